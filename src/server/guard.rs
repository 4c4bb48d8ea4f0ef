//! What stands before every handler: request ids, keys, the Host check on loopback, and the line in the log.
//!
//! Guarantees: a request with a wrong key reaches no handler; keys are compared by their digests without an early end;
//! on loopback only local host names are answered, so that a web page cannot reach the server under a name of its own.

use super::app::{App, Caller, new_id};
use super::error::{ApiError, ErrorShape};
use super::traces::TraceContext;
use super::{inference, messages};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::time::Instant;

const REQUEST_ID: &str = "x-request-id";
/// Longer request ids are replaced.
const MAX_REQUEST_ID: usize = 200;

/// Routes that need no key.
const OPEN_ROUTES: [&str; 9] = [
    "/health",
    "/health/live",
    "/health/ready",
    "/health/generate",
    "/ping",
    "/version",
    "/metrics",
    "/v2/health/live",
    "/v2/health/ready",
];

/// Whether a path is served to those who have a key only, where there are keys.
pub fn needs_key(path: &str) -> bool {
    !OPEN_ROUTES.contains(&path)
}

/// Names the request, checks host and key, answers, logs.
pub async fn guard(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let request_id = request_id(request.headers());
    let key = presented_key(request.headers()).unwrap_or_default().to_owned();
    let trace = request.headers().get("traceparent").and_then(|value| TraceContext::parse(value.to_str().ok()?));
    let caller = Caller { request_id: request_id.clone(), owner: owner_of(&key), trace };
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let refusal = check_host(&app, &request).or_else(|| check_key(&app, &path, &key));
    let mut response = match refusal {
        Some(error) => error.into_response(),
        None => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
    };
    response = in_shape_of(&path, response);
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    if app.options.logs_requests {
        let (status, ms) = (response.status().as_u16(), started.elapsed().as_millis() as u64);
        let trace = trace.map(|trace| format!(" trace {:032x}", trace.trace_id)).unwrap_or_default();
        tracing::info!("{method} {path} {status} {ms} ms {request_id}{trace}");
    }
    response
}

/// Errors, wherever they come from, get the shape of the path's API.
fn in_shape_of(path: &str, response: Response) -> Response {
    let Some(error) = response.extensions().get::<ApiError>() else { return response };
    let body = match ErrorShape::of_path(path) {
        ErrorShape::OpenAi => return response,
        ErrorShape::Anthropic => serde_json::to_string(&messages::error_body(error)),
        ErrorShape::Inference => serde_json::to_string(&inference::error_body(error)),
    };
    let (mut parts, _) = response.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, body.expect("an error holds strings only").into())
}

/// An id that a client may choose: 1 to 200 visible ASCII characters.
pub fn is_plain_id(id: &str) -> bool {
    !id.is_empty() && id.len() <= MAX_REQUEST_ID && id.chars().all(|c| c.is_ascii_graphic())
}

/// The client's id where it is short and plain, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    given.filter(|id| is_plain_id(id)).map_or_else(|| new_id("req-"), str::to_owned)
}

/// The key as OpenAI's clients or as Anthropic's send it.
fn presented_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok()))
}

/// Clients are told apart by their keys, also where keys are not checked.
fn owner_of(key: &str) -> u64 {
    if key.is_empty() {
        return 0;
    }
    let digest = Sha256::digest(key.as_bytes());
    u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
}

fn check_key(app: &App, path: &str, key: &str) -> Option<ApiError> {
    if !needs_key(path) || app.options.api_keys.is_empty() {
        return None;
    }
    let digest = Sha256::digest(key.as_bytes());
    let mut is_known = false;
    for known in &app.options.api_keys {
        let known = Sha256::digest(known.as_bytes());
        let difference = digest.iter().zip(known.iter()).fold(0u8, |all, (a, b)| all | (a ^ b));
        is_known |= difference == 0;
    }
    (!is_known).then(|| {
        let message = if key.is_empty() { "an API key is wanted" } else { "the API key is not known" };
        ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message).with_code("invalid_api_key")
    })
}

/// Every name that the request has for the server must be one of its own.
fn check_host(app: &App, request: &Request) -> Option<ApiError> {
    let is_loopback = matches!(app.options.host.as_str(), "localhost" | "::1") || app.options.host.starts_with("127.");
    if !is_loopback || app.options.uds.is_some() {
        return None;
    }
    let is_allowed = |host: &str| {
        let (name, port) = match host.strip_prefix('[') {
            Some(rest) => rest.split_once(']').unwrap_or((rest, "")),
            None => host.split_at(host.find(':').unwrap_or(host.len())),
        };
        let is_port = port.is_empty() || port.strip_prefix(':').is_some_and(|n| n.chars().all(|c| c.is_ascii_digit()));
        let is_local = name.eq_ignore_ascii_case("localhost")
            || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
        is_port && (is_local || app.options.allowed_hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(name)))
    };
    let named = request.headers().get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or_default());
    let authority = request.uri().authority().map(|authority| authority.as_str());
    (!named.chain(authority).all(is_allowed)).then(|| {
        ApiError::new(StatusCode::FORBIDDEN, "invalid_request_error", "this host name is not served here")
            .with_code("host_not_allowed")
    })
}
