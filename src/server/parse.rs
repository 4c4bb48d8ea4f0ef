//! Bodies, paths and queries to typed requests: size, media type, JSON, types; the error names the field.

use super::app::App;
use super::error::{ApiError, ApiResult};
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::Duration;
use utoipa::ToSchema;

/// The parameters of a path: one text, or a struct with their names.
pub struct PathFields<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathFields<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(fields) = Path::<T>::from_request_parts(parts, state)
            .await
            .map_err(|e| ApiError::bad_request(format!("the path cannot be read: {}", e.body_text())))?;
        Ok(PathFields(fields))
    }
}

/// The fields of a query.
pub struct QueryFields<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryFields<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Query(fields) = Query::<T>::from_request_parts(parts, state)
            .await
            .map_err(|e| ApiError::bad_request(format!("the query cannot be read: {}", e.body_text())))?;
        Ok(QueryFields(fields))
    }
}

/// Which model is meant, where several are served.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct ModelQuery {
    /// The first model where none is named.
    pub model: Option<String>,
}

/// A body must have come whole by then.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// A body that is a JSON object within the limits.
pub struct JsonBody(pub Value);

impl FromRequest<App> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        check_media_type(&parts.headers)?;
        let bytes = bytes(&parts.headers, body, app.options.max_body_bytes).await?;
        object(&bytes).map(JsonBody)
    }
}

/// Reads a body of at most `max_bytes` that is not compressed.
pub async fn bytes(headers: &HeaderMap, body: Body, max_bytes: usize) -> ApiResult<Bytes> {
    if headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
        return Err(media_error("compressed bodies are not supported"));
    }
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > max_bytes as u64) {
        return Err(too_large(max_bytes));
    }
    tokio::time::timeout(BODY_TIMEOUT, whole(body, max_bytes)).await.map_err(|_| {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "the body did not come in time")
    })?
}

fn too_large(max_bytes: usize) -> ApiError {
    let message = format!("the body is larger than {max_bytes} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
}

async fn whole(body: Body, max_bytes: usize) -> ApiResult<Bytes> {
    let mut chunks = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|_| ApiError::bad_request("the body ended early"))?;
        if chunk.len() > max_bytes - bytes.len() {
            return Err(too_large(max_bytes));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes.into())
}

/// The JSON object that the bytes are.
pub fn object(bytes: &[u8]) -> ApiResult<Value> {
    let value: Value = serde_json::from_slice(bytes).map_err(|e| ApiError::bad_request(fault_of_json(&e)))?;
    match value {
        Value::Object(_) => Ok(value),
        _ => Err(ApiError::bad_request("the body must be a JSON object")),
    }
}

fn fault_of_json(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.strip_prefix("recursion limit exceeded") {
        Some(place) => format!("the body is nested too deeply (127 levels are read){place}"),
        None => format!("the body is not valid JSON: {text}"),
    }
}

/// 415 for a body of a kind that is not read.
pub fn media_error(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
}

fn check_media_type(headers: &HeaderMap) -> ApiResult<()> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(media_error("the Content-Type must be application/json"))
}

/// The fields of a request that `T` knows; others are left alone.
pub fn fields<T: DeserializeOwned>(value: &Value) -> ApiResult<T> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let fault = error.inner().to_string();
        let missing = fault.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        let param = match (path.as_str(), missing) {
            (".", Some(field)) => field.to_owned(),
            (path, Some(field)) => format!("{path}.{field}"),
            (path, None) => path.to_owned(),
        };
        ApiError::invalid(param.clone(), format!("{param}: {fault}"))
    })
}

/// Refuses known fields that are not supported: `is_harmless` says which values mean the same as leaving it out.
pub fn refuse(value: &Value, fields: &[(&'static str, fn(&Value) -> bool)]) -> ApiResult<()> {
    for (field, is_harmless) in fields {
        match value.get(field) {
            None | Some(Value::Null) => {}
            Some(given) if is_harmless(given) => {}
            Some(_) => return Err(ApiError::unsupported(*field, format!("{field} is not supported"))),
        }
    }
    Ok(())
}

/// A field of a part of the body that must be a string.
pub fn text_of<'a>(value: &'a Value, at: &str, field: &str) -> ApiResult<&'a str> {
    value.get(field).and_then(Value::as_str).ok_or_else(|| {
        let param = format!("{at}.{field}");
        ApiError::invalid(param.clone(), format!("{param} must be a string"))
    })
}
