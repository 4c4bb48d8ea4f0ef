//! Errors as OpenAI's API words them: a status, and `{"error": {"message", "type", "param", "code"}}`.
//!
//! Guarantees: client mistakes are 4xx and name the field; faults of the engine are 5xx without internals.

use crate::protocol::RunError;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

/// Seconds after which a refused client may try again.
const RETRY_AFTER_S: u32 = 1;

/// An error on its way to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub body: ErrorBody,
    pub retry_after_s: Option<u32>,
}

/// The body of every error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ErrorResponse {
    pub error: ErrorBody,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ErrorBody {
    pub message: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The field that is wrong.
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

/// In which shape an API tells errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorShape {
    OpenAi,
    Anthropic,
    Inference,
}

impl ErrorShape {
    pub fn of_path(path: &str) -> Self {
        let is_below =
            |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        match () {
            () if is_below("/v1/messages") => ErrorShape::Anthropic,
            () if is_below("/v2") => ErrorShape::Inference,
            () => ErrorShape::OpenAi,
        }
    }
}

pub type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let body = ErrorBody { message: message.into(), kind, param: None, code: None };
        ApiError { status, body, retry_after_s: None }
    }

    /// 400 for a field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::bad_request(message).with_param(param)
    }

    /// 400 for the body as a whole.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 501 for a field that is known and not supported.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "not_supported_error", message)
            .with_param(param)
            .with_code("unsupported_parameter")
    }

    /// For something of a type that is not supported: 501 where the type is known, else 400.
    pub fn unsupported_kind(param: impl Into<String>, what: &str, kind: &str, is_known: bool) -> Self {
        match is_known {
            true => Self::unsupported(param, format!("{what} of type `{kind}` are not supported")),
            false => Self::invalid(param, format!("{what} of type `{kind}` are not known")),
        }
    }

    /// 415 for images, sound and the like.
    pub fn media(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
            .with_param(param)
            .with_code("unsupported_media_type")
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).with_code("not_found")
    }

    /// 503, to be tried again.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", message).with_retry()
    }

    /// 429, to be tried again.
    pub fn too_many(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            .with_code("rate_limit_exceeded")
            .with_retry()
    }

    /// 500 without internals; the log has them.
    pub fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "the engine failed on this request")
    }

    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.body.param = Some(param.into());
        self
    }

    pub fn with_code(mut self, code: &'static str) -> Self {
        self.body.code = Some(code);
        self
    }

    fn with_retry(mut self) -> Self {
        self.retry_after_s = Some(RETRY_AFTER_S);
        self
    }

    /// The body as JSON text.
    pub fn json(&self) -> String {
        let body = ErrorResponse { error: self.body.clone() };
        serde_json::to_string(&body).expect("an error holds strings only")
    }

    /// What an engine's refusal or failure is to a client whose prompt came as `prompt_field`.
    pub fn of_run(error: &RunError, prompt_field: &'static str) -> Self {
        match error {
            RunError::NoHead => Self::invalid("model", error.to_string()),
            RunError::EmptyPrompt => Self::invalid(prompt_field, "the prompt has no tokens"),
            RunError::TokenOutOfRange { .. } => Self::invalid(prompt_field, error.to_string()),
            RunError::PromptTooLong { prompt, max_model_len } => Self::invalid(
                prompt_field,
                format!(
                    "{}, one of them for the answer; the prompt has {prompt} tokens",
                    context_limit(*max_model_len)
                ),
            )
            .with_code("context_length_exceeded"),
            RunError::ContextExceeded { needed, max_model_len } => Self::invalid(
                prompt_field,
                format!("{}; prompt and completion need {needed}", context_limit(*max_model_len)),
            )
            .with_code("context_length_exceeded"),
            RunError::NeverFits { .. } | RunError::PinLimit { .. } | RunError::PrefixLost => {
                Self::invalid(prompt_field, error.to_string()).with_code("kv_cache_exceeded")
            }
            RunError::InvalidParam(invalid) if invalid.field == "beam_width" => {
                Self::invalid("n", format!("the number of beams {}", invalid.message))
            }
            RunError::InvalidParam(invalid) => {
                Self::invalid(invalid.field, format!("{} {}", invalid.field, invalid.message))
            }
            RunError::QueueFull { limit } => Self::too_many(format!("the queue is full ({limit} requests wait)")),
            RunError::NoModel => Self::unavailable("the model is not ready"),
            RunError::ShutDown => Self::unavailable("the server is shutting down"),
            RunError::NotFinite { .. } | RunError::Corrupted { .. } | RunError::Engine(_) => {
                tracing::error!("a request failed: {error}");
                Self::internal()
            }
        }
    }
}

/// Clients look for these words.
fn context_limit(max_model_len: u32) -> String {
    format!("This model's maximum context length is {max_model_len} tokens")
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        let mut response = (self.status, json, self.json()).into_response();
        // For paths whose errors have another shape.
        response.extensions_mut().insert(self.clone());
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
