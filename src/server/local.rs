//! The same API without a socket, for `kvasir run-batch`: requests go straight to the router.
//!
//! Guarantees: what a request gets is what it would get over HTTP, errors included. Streams are refused.

use super::app::AppState;
use super::fleet::Fleet;
use super::options::ServerOptions;
use super::routes;
use crate::engine::EngineHandle;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, header};
use serde_json::{Value, json};
use tower_service::Service;

/// Longest answer that is kept.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// The API over an engine of this process. Clones share it.
#[derive(Clone)]
pub struct LocalApi {
    router: Router,
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalAnswer {
    pub status: u16,
    pub request_id: String,
    pub body: Value,
}

impl LocalApi {
    /// Keys, hosts and addresses of the options mean nothing here.
    pub fn new(engine: EngineHandle, options: ServerOptions) -> Self {
        let options = ServerOptions { api_keys: Vec::new(), logs_requests: false, ..options };
        LocalApi { router: routes::router(AppState::new(Fleet::of_one(engine, options.served_names.clone()), options)) }
    }

    /// Posts a body to a path.
    pub async fn post(&self, path: &str, body: &Value) -> LocalAnswer {
        let fault = |message: &str| LocalAnswer {
            status: 400,
            request_id: String::new(),
            body: json!({ "error": { "message": message, "type": "invalid_request_error", "param": null, "code": null } }),
        };
        if body["stream"] == true {
            return fault("answers of a batch are not streamed");
        }
        let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
        let Ok(request) = request.body(Body::from(body.to_string())) else { return fault("the url is not a path") };
        let mut router = self.router.clone();
        let response = match router.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let (head, body) = response.into_parts();
        let request_id = head.headers.get("x-request-id").and_then(|id| id.to_str().ok()).unwrap_or_default();
        let bytes = to_bytes(body, MAX_ANSWER_BYTES).await.unwrap_or_default();
        LocalAnswer {
            status: head.status.as_u16(),
            request_id: request_id.to_owned(),
            body: serde_json::from_slice(&bytes).unwrap_or(Value::Null),
        }
    }
}
