//! Which path leads to which handler, and the layers around them.

use super::app::App;
use super::error::ApiError;
use super::{chat, completions, guard, health, infer, inference, messages, models, observe, responses, tokens};
use axum::Router;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::any::Any;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowOrigin, CorsLayer};

/// The whole service.
pub fn router(app: App) -> Router {
    let routes = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/chat/completions/render", post(chat::render))
        .route("/v1/completions", post(completions::create))
        .route("/v1/completions/render", post(completions::render))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::show).delete(responses::delete))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v2", get(inference::server))
        .route("/v2/health/live", get(health::live))
        .route("/v2/health/ready", get(health::ready))
        .route("/v2/models/{name}", get(inference::model))
        .route("/v2/models/{name}/ready", get(inference::model_ready))
        .route("/v2/models/{name}/config", get(inference::config))
        .route("/v2/models/{name}/infer", post(infer::infer))
        .route("/v2/models/{name}/versions/{version}", get(inference::model))
        .route("/v2/models/{name}/versions/{version}/ready", get(inference::model_ready))
        .route("/v2/models/{name}/versions/{version}/infer", post(infer::infer))
        .route("/v2/repository/index", post(inference::index))
        .route("/v2/models/{name}/generate", post(inference::generate))
        .route("/v2/models/{name}/generate_stream", post(inference::generate_stream))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::show))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/health", get(health::ready))
        .route("/health/ready", get(health::ready))
        .route("/health/live", get(health::live))
        .route("/health/generate", get(health::generate))
        .route("/ping", get(health::ready).post(health::ready))
        .route("/version", get(health::version))
        .route("/metrics", get(observe::metrics))
        .route("/kvasir/v1/state", get(observe::state))
        .route("/kvasir/v1/steps", get(observe::steps))
        .route("/load", get(health::load))
        .route("/v1/loads", get(health::loads))
        .route("/is_sleeping", get(health::is_sleeping))
        .route("/reset_prefix_cache", post(health::reset_prefix_cache))
        .route("/abort_requests", post(health::abort_requests))
        .fallback(|| async { ApiError::not_found("there is nothing at this path") })
        .method_not_allowed_fallback(|| async {
            let message = "this path is not served with this method";
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
        })
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(app.clone(), guard::guard));
    match cors(&app.options.allowed_origins) {
        Some(layer) => routes.layer(layer).with_state(app),
        None => routes.with_state(app),
    }
}

fn panicked(_: Box<dyn Any + Send>) -> Response {
    ApiError::internal().into_response()
}

/// Outermost, since a browser asks without a key whether it may ask. `None` where no origin is allowed.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    let allowed = match origins {
        [] => return None,
        all if all.iter().any(|origin| origin == "*") => AllowOrigin::any(),
        some => AllowOrigin::list(some.iter().filter_map(|origin| HeaderValue::from_str(origin).ok())),
    };
    let headers = ["x-request-id", "x-api-key", "anthropic-version", "traceparent"].map(HeaderName::from_static);
    Some(
        CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods([Method::GET, Method::POST, Method::DELETE])
            .allow_headers([header::AUTHORIZATION, header::CONTENT_TYPE].into_iter().chain(headers).collect::<Vec<_>>())
            .expose_headers([HeaderName::from_static("x-request-id"), header::RETRY_AFTER]),
    )
}
