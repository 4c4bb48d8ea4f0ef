//! Which path leads to which handler, what is said about it in the document, and the layers around all.

use super::adapters::{LoadLoraFields, UnloadLoraFields};
use super::app::App;
use super::embeddings::{EmbeddingFields, EmbeddingResponse};
use super::error::ApiError;
use super::health::{AbortFields, Aborted, ReplicaLoads, ServerLoad, Sleeping, Version};
use super::infer::{InferFields, InferResponse};
use super::inference::{GenerateFields, GenerateResponse, ModelConfig, ModelEntry, ModelMetadata, ServerMetadata};
use super::models::{ModelCard, ModelList};
use super::observe::{DescribedModel, EngineState, StepEvent, StepsQuery};
use super::openapi::{Endpoint, OpenApiDocument};
use super::parse::ModelQuery;
use super::prefixes::{ChangedPrefix, EvictedPrefix, KeepFields, PinFields, PinnedPrefix, PrefixList};
use super::structured::StructuredFields;
use super::tokens::{DetokenizeRequest, DetokenizeResponse, TokenizeFields, TokenizeResponse};
use super::tools::ToolFields;
use super::wire::chat::{ChatChunk, ChatFields, ChatResponse};
use super::wire::completion::{CompletionFields, CompletionResponse};
use super::wire::messages::{Message, MessageCount, MessagesEvent, MessagesFields, MessagesLimit};
use super::wire::responses::{DeletedResponse, NumberedEvent, ResponseObject, ResponsesFields};
use super::wire::{RenderedPrompt, SamplingFields};
use super::{
    adapters, chat, completions, embeddings, guard, health, infer, inference, messages, models, observe, openapi,
    prefixes, responses, tokens,
};
use axum::Router;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use std::any::Any;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowOrigin, CorsLayer};

/// Every endpoint, with its description.
pub fn endpoints() -> Vec<Endpoint> {
    [of_openai(), of_anthropic(), of_inference(), of_routers(), of_operators()].into_iter().flatten().collect()
}

fn of_openai() -> Vec<Endpoint> {
    let chat = |endpoint: Endpoint| {
        endpoint.takes::<ChatFields>().takes::<SamplingFields>().takes::<StructuredFields>().takes::<ToolFields>()
    };
    let completion =
        |endpoint: Endpoint| endpoint.takes::<CompletionFields>().takes::<SamplingFields>().takes::<StructuredFields>();
    let all = [
        chat(Endpoint::post("/v1/chat/completions", "Answers a conversation", chat::create))
            .answers::<ChatResponse>()
            .streams::<ChatChunk<'static>>()
            .runs(),
        chat(Endpoint::post("/v1/chat/completions/render", "The tokens that a chat would run on", chat::render))
            .answers::<RenderedPrompt>()
            .runs(),
        completion(Endpoint::post("/v1/completions", "Goes on from prompts", completions::create))
            .answers::<CompletionResponse>()
            .streams::<CompletionResponse>()
            .runs(),
        completion(Endpoint::post(
            "/v1/completions/render",
            "The tokens that a completion would run on",
            completions::render,
        ))
        .answers_list::<RenderedPrompt>()
        .runs(),
        Endpoint::post("/v1/embeddings", "Vectors of texts", embeddings::create)
            .takes::<EmbeddingFields>()
            .answers::<EmbeddingResponse>()
            .runs(),
        Endpoint::post("/v1/responses", "Answers in items; sampling fields are as in chats", responses::create)
            .takes::<ResponsesFields>()
            .answers::<ResponseObject>()
            .streams::<NumberedEvent>()
            .runs(),
        Endpoint::get("/v1/responses/{id}", "A response that was kept", responses::show).answers::<ResponseObject>(),
        Endpoint::delete("/v1/responses/{id}", "Forgets a response", responses::delete).answers::<DeletedResponse>(),
        Endpoint::get("/v1/models", "The models that are served", models::list).answers::<ModelList>().refuses(&[503]),
        Endpoint::get("/v1/models/{*id}", "One model", models::show).answers::<ModelCard>().refuses(&[503]),
    ];
    all.into_iter().map(|endpoint| endpoint.tag("OpenAI")).collect()
}

fn of_anthropic() -> Vec<Endpoint> {
    let all = [
        Endpoint::post("/v1/messages", "Answers a conversation", messages::create)
            .takes::<MessagesFields>()
            .takes::<MessagesLimit>()
            .answers::<Message>()
            .streams::<MessagesEvent>()
            .runs(),
        Endpoint::post("/v1/messages/count_tokens", "Counts the tokens of a conversation", messages::count_tokens)
            .takes::<MessagesFields>()
            .answers::<MessageCount>()
            .runs(),
    ];
    all.into_iter().map(|endpoint| endpoint.tag("Anthropic")).collect()
}

fn of_inference() -> Vec<Endpoint> {
    let model = |path| Endpoint::get(path, "One model", inference::model).answers::<ModelMetadata>().refuses(&[503]);
    let ready = |path| Endpoint::get(path, "Whether the model is served", inference::model_ready).refuses(&[503]);
    let infer = |path| {
        let endpoint = Endpoint::post(path, "Goes on from texts as tensors", infer::infer);
        endpoint.takes::<InferFields>().answers::<InferResponse>().answers_bytes().runs()
    };
    let all = [
        Endpoint::get("/v2", "What the server is", inference::server).answers::<ServerMetadata>(),
        Endpoint::get("/v2/health/live", "Whether the engine is alive", health::live).refuses(&[503]),
        Endpoint::get("/v2/health/ready", "Whether requests are served", health::ready).refuses(&[503]),
        model("/v2/models/{name}"),
        model("/v2/models/{name}/versions/{version}"),
        ready("/v2/models/{name}/ready"),
        ready("/v2/models/{name}/versions/{version}/ready"),
        Endpoint::get("/v2/models/{name}/config", "Tensors of the model", inference::config)
            .answers::<ModelConfig>()
            .refuses(&[503]),
        infer("/v2/models/{name}/infer"),
        infer("/v2/models/{name}/versions/{version}/infer"),
        Endpoint::post("/v2/repository/index", "The models that are served", inference::index)
            .answers_list::<ModelEntry>()
            .refuses(&[503]),
        Endpoint::post("/v2/models/{name}/generate", "Goes on from a text", inference::generate)
            .takes::<GenerateFields>()
            .answers::<GenerateResponse>()
            .runs(),
        Endpoint::post("/v2/models/{name}/generate_stream", "Goes on from a text", inference::generate_stream)
            .takes::<GenerateFields>()
            .streams::<GenerateResponse>()
            .runs(),
    ];
    all.into_iter().map(|endpoint| endpoint.tag("Open Inference")).collect()
}

/// What routers and clients ask besides.
fn of_routers() -> Vec<Endpoint> {
    let ready = |path| Endpoint::get(path, "Whether requests are served", health::ready).refuses(&[503]);
    vec![
        Endpoint::post("/tokenize", "Tokens of a prompt or a chat", tokens::tokenize)
            .takes::<TokenizeFields>()
            .answers::<TokenizeResponse>()
            .refuses(&[404, 503]),
        Endpoint::post("/detokenize", "Text of tokens", tokens::detokenize)
            .takes::<DetokenizeRequest>()
            .answers::<DetokenizeResponse>()
            .refuses(&[404, 503]),
        ready("/health"),
        ready("/health/ready"),
        ready("/ping"),
        Endpoint::post("/ping", "Whether requests are served", health::ready).refuses(&[503]),
        Endpoint::get("/health/live", "Whether the engine is alive", health::live).refuses(&[503]),
        Endpoint::get("/health/generate", "Whether a token can be made", health::generate).refuses(&[429, 503]),
        Endpoint::get("/version", "The version", health::version).answers::<Version>(),
        Endpoint::get("/load", "Requests under way", health::load).answers::<ServerLoad>(),
        Endpoint::get("/v1/loads", "Load in the words of SGLang's routers", health::loads)
            .query::<ModelQuery>()
            .answers::<ReplicaLoads>()
            .refuses(&[404, 503]),
        Endpoint::get("/is_sleeping", "Whether the engine sleeps", health::is_sleeping).answers::<Sleeping>(),
    ]
}

fn of_operators() -> Vec<Endpoint> {
    vec![
        Endpoint::get("/metrics", "Counters in Prometheus' text format", observe::metrics).answers_text(),
        Endpoint::get("/kvasir/v1/model", "The model with its tokenizer, for a remote app", observe::model)
            .query::<ModelQuery>()
            .answers::<DescribedModel>()
            .refuses(&[404, 429, 503]),
        Endpoint::get("/kvasir/v1/state", "The engine's latest snapshot", observe::state)
            .query::<ModelQuery>()
            .answers::<EngineState>()
            .refuses(&[404, 503]),
        Endpoint::get("/kvasir/v1/steps", "The stream of step records", observe::steps)
            .query::<StepsQuery>()
            .streams::<StepEvent>()
            .refuses(&[404, 503]),
        Endpoint::get("/kvasir/v1/prefixes", "Prefixes that the cache knows", prefixes::list)
            .query::<ModelQuery>()
            .answers::<PrefixList>()
            .refuses(&[404, 503]),
        Endpoint::post("/kvasir/v1/prefixes", "Computes a prefix ahead and keeps it", prefixes::pin)
            .takes::<PinFields>()
            .answers::<PinnedPrefix>()
            .runs(),
        Endpoint::post("/kvasir/v1/prefixes/{id}", "Keeps a known prefix, names it or lets it go", prefixes::change)
            .takes::<KeepFields>()
            .query::<ModelQuery>()
            .answers::<ChangedPrefix>()
            .runs(),
        Endpoint::delete("/kvasir/v1/prefixes/{id}", "Evicts a prefix", prefixes::evict)
            .query::<ModelQuery>()
            .answers::<EvictedPrefix>()
            .refuses(&[503]),
        Endpoint::post("/v1/load_lora_adapter", "Loads a LoRA adapter from a folder of the server", adapters::load)
            .takes::<LoadLoraFields>()
            .answers_text()
            .runs(),
        Endpoint::post("/v1/unload_lora_adapter", "Unloads a LoRA adapter", adapters::unload)
            .takes::<UnloadLoraFields>()
            .answers_text()
            .runs()
            .refuses(&[409]),
        Endpoint::post("/reset_prefix_cache", "Forgets prefixes that are not pinned", health::reset_prefix_cache)
            .refuses(&[503]),
        Endpoint::post(
            "/abort_requests",
            "Aborts requests of the caller's key by name, or all of them",
            health::abort_requests,
        )
        .takes::<AbortFields>()
        .answers::<Aborted>(),
        Endpoint::get("/openapi.json", "This document", openapi::show).answers::<OpenApiDocument>(),
    ]
}

/// The whole service.
pub fn router(app: App) -> Router {
    let add = |router: Router<App>, endpoint: Endpoint| router.route(endpoint.path, endpoint.handler);
    let routes = endpoints()
        .into_iter()
        .fold(Router::new(), add)
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
