//! `POST /v2/models/{name}/infer`: texts as tensors, in JSON or as bytes behind it (the protocol's binary extension).
//!
//! Guarantees: each element of the tensor `text_input` is a prompt, and gets one element of `text_output` and one of
//! `finish_reason`, in order; every other tensor has one element and is a field of a completion; bytes that no tensor
//! names, or too few of them, are refused. Not attempted: compressed bodies, shared memory, sequences, streams (which
//! `generate_stream` serves).

use super::app::{App, Caller, new_id};
use super::completions;
use super::error::{ApiError, ApiResult};
use super::inference::{self, ModelPath};
use super::parse::{self, PathFields};
use super::reducer::Delta;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, HeaderName, header};
use axum::response::{IntoResponse, Json, Response};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// Bytes of the JSON at the head of a body, where tensors follow it.
const JSON_LENGTH: &str = "inference-header-content-length";
/// The outputs there are.
const OUTPUTS: [&str; 2] = ["text_output", "finish_reason"];
/// Parameters of the protocol itself, with the values that mean nothing here.
const PROTOCOL: [(&str, fn(&Value) -> bool); 5] = [
    ("binary_data_output", |value| value.is_boolean()),
    ("timeout", |_| true),
    ("sequence_id", |id| *id == 0 || *id == ""),
    ("sequence_start", |value| value.is_boolean()),
    ("sequence_end", |value| value.is_boolean()),
];

/// Tensors in; a tensor's data stands beside its shape, or as bytes behind the JSON.
#[derive(ToSchema)]
#[allow(dead_code, reason = "tensors are read by hand, since their data may lie behind the JSON")]
pub struct InferFields {
    id: Option<String>,
    #[schema(value_type = Option<Object>)]
    parameters: Option<()>,
    #[schema(min_items = 1)]
    inputs: Vec<InputTensor>,
    outputs: Option<Vec<WantedTensor>>,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "tensors are read by hand, since their data may lie behind the JSON")]
pub struct InputTensor {
    name: String,
    datatype: String,
    shape: Vec<u64>,
    /// A list, which may hold lists.
    data: Vec<Value>,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "tensors are read by hand, since their data may lie behind the JSON")]
pub struct WantedTensor {
    #[schema(pattern = "^(text_output|finish_reason)$")]
    name: String,
}

/// The JSON of an answer. Where bytes are wanted they lie behind it, and the media type is `application/octet-stream`.
#[derive(ToSchema)]
#[allow(dead_code, reason = "tensors are written by hand, since their data may lie behind the JSON")]
pub struct InferResponse {
    id: String,
    model_name: String,
    model_version: String,
    outputs: Vec<OutputTensor>,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "tensors are written by hand, since their data may lie behind the JSON")]
pub struct OutputTensor {
    name: String,
    datatype: String,
    shape: Vec<u64>,
    data: Option<Vec<String>>,
}

pub async fn infer(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    PathFields(path): PathFields<ModelPath>,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    check_origin(&headers)?;
    let bytes = parse::bytes(&headers, body, app.options.max_body_bytes).await?;
    let (head, binary) = split(&headers, &bytes)?;
    let inputs = tensors(&head, binary)?;
    let outputs = outputs(&head)?;
    let name = path.check(&app)?;
    let id = head["id"].as_str().map_or_else(|| new_id("infer-"), str::to_owned);
    let (shape, body) = completion(&name, &head, inputs)?;
    let prepared = completions::prepare_off_thread(&app, &caller, body).await?;
    let (generation, reducer) = prepared.start(&app, &caller, &id)?;
    let mut texts = vec![String::new(); reducer.num_choices()];
    let mut reasons = vec![String::new(); reducer.num_choices()];
    let take = |delta: Delta| {
        texts[delta.choice].push_str(&completions::text_of(delta.parts));
        if let Some(finish) = delta.finish {
            reasons[delta.choice] = finish.reason.to_owned();
        }
    };
    reducer.drain(generation, "text_input", take).await?;
    let data = |name: &str| if name == OUTPUTS[0] { &texts } else { &reasons };
    Ok(respond(&id, &name, &shape, outputs.iter().map(|output| (output, data(output.name).as_slice()))))
}

/// A page of the web can post without asking first where it names no media type, or a plain one.
fn check_origin(headers: &HeaderMap) -> ApiResult<()> {
    let media = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = media.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_asked = matches!(essence.as_str(), "application/json" | "application/octet-stream");
    if is_asked || (essence.is_empty() && !headers.contains_key(header::ORIGIN)) {
        return Ok(());
    }
    Err(parse::media_error("the Content-Type must be application/json or application/octet-stream"))
}

/// The JSON of a body, and the bytes behind it.
fn split<'a>(headers: &HeaderMap, bytes: &'a [u8]) -> ApiResult<(Value, &'a [u8])> {
    let length = match headers.get(JSON_LENGTH) {
        None => bytes.len(),
        Some(length) => {
            let length = length.to_str().ok().and_then(|length| length.parse().ok());
            length.filter(|&length| length <= bytes.len()).ok_or_else(|| {
                ApiError::invalid(JSON_LENGTH, format!("{JSON_LENGTH} must be at most the length of the body"))
            })?
        }
    };
    Ok((parse::object(&bytes[..length])?, &bytes[length..]))
}

struct Tensor {
    name: String,
    shape: Vec<u64>,
    values: Vec<Value>,
}

fn tensors(head: &Value, mut binary: &[u8]) -> ApiResult<Vec<Tensor>> {
    let list = head["inputs"].as_array().filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| ApiError::invalid("inputs", "inputs must be a list of tensors"))?;
    let mut tensors = Vec::with_capacity(list.len());
    for (i, input) in list.iter().enumerate() {
        tensors.push(tensor(&format!("inputs[{i}]"), input, &mut binary)?);
    }
    if !binary.is_empty() {
        let message = format!("{} bytes behind the JSON belong to no tensor", binary.len());
        return Err(ApiError::invalid("inputs", message));
    }
    Ok(tensors)
}

fn tensor(path: &str, input: &Value, binary: &mut &[u8]) -> ApiResult<Tensor> {
    let fault = |what: &str| ApiError::invalid(path, format!("{path}: {what}"));
    let name = input["name"].as_str().ok_or_else(|| fault("name must be a string"))?.to_owned();
    let datatype = input["datatype"].as_str().ok_or_else(|| fault("datatype must be a string"))?;
    let shape: Option<Vec<u64>> = input["shape"].as_array().and_then(|all| all.iter().map(Value::as_u64).collect());
    let shape = shape.ok_or_else(|| fault("shape must be a list of sizes"))?;
    let values = match input["parameters"]["binary_data_size"].as_u64() {
        Some(size) => {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            let (own, rest) = binary.split_at_checked(size).ok_or_else(|| fault("its bytes are missing"))?;
            *binary = rest;
            decode(datatype, own).map_err(|what| fault(&what))?
        }
        None => {
            let mut flat = Vec::new();
            flatten(input.get("data").ok_or_else(|| fault("data is missing"))?, &mut flat);
            flat
        }
    };
    if shape.iter().try_fold(1u64, |all, &size| all.checked_mul(size)) != Some(values.len() as u64) {
        return Err(fault(&format!("it has {} elements, which is not what its shape says", values.len())));
    }
    Ok(Tensor { name, shape, values })
}

fn flatten(data: &Value, flat: &mut Vec<Value>) {
    match data {
        Value::Array(list) => list.iter().for_each(|inner| flatten(inner, flat)),
        value => flat.push(value.clone()),
    }
}

fn decode(datatype: &str, bytes: &[u8]) -> Result<Vec<Value>, String> {
    let cut = || format!("{} bytes are no whole number of {datatype}", bytes.len());
    macro_rules! numbers {
        ($kind:ty) => {{
            let (chunks, rest) = bytes.as_chunks::<{ size_of::<$kind>() }>();
            if !rest.is_empty() {
                return Err(cut());
            }
            chunks.iter().map(|&chunk| json!(<$kind>::from_le_bytes(chunk))).collect()
        }};
    }
    Ok(match datatype {
        "BYTES" => return strings(bytes).ok_or_else(|| "its bytes are not length and UTF-8 text in turn".to_owned()),
        "BOOL" => bytes.iter().map(|&byte| json!(byte != 0)).collect(),
        "UINT8" => numbers!(u8),
        "UINT16" => numbers!(u16),
        "UINT32" => numbers!(u32),
        "UINT64" => numbers!(u64),
        "INT8" => numbers!(i8),
        "INT16" => numbers!(i16),
        "INT32" => numbers!(i32),
        "INT64" => numbers!(i64),
        "FP32" => numbers!(f32),
        "FP64" => numbers!(f64),
        _ => return Err(format!("the datatype {datatype} is not known")),
    })
}

/// Strings, each behind its length in four bytes.
fn strings(mut bytes: &[u8]) -> Option<Vec<Value>> {
    let mut all = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<4>() {
        let (text, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        all.push(Value::from(std::str::from_utf8(text).ok()?));
        bytes = rest;
    }
    bytes.is_empty().then_some(all)
}

/// The shape of the prompts' tensor, and the same request as a completion of several prompts.
fn completion(name: &str, head: &Value, inputs: Vec<Tensor>) -> ApiResult<(Vec<u64>, Value)> {
    let mut fields = Map::new();
    let mut prompts = None;
    if let Some(parameters) = head["parameters"].as_object() {
        parse::refuse(&head["parameters"], &PROTOCOL)?;
        fields.extend(parameters.clone());
        PROTOCOL.iter().for_each(|(own, _)| _ = fields.remove(*own));
    }
    for mut tensor in inputs {
        if tensor.name == "text_input" {
            if let Some(other) = tensor.values.iter().find(|value| !value.is_string()) {
                return Err(ApiError::invalid("text_input", format!("text_input must hold strings, not {other}")));
            }
            prompts = Some((tensor.shape, tensor.values));
            continue;
        }
        let value = tensor.values.pop().filter(|_| tensor.values.is_empty());
        let name = tensor.name;
        let value = value.ok_or_else(|| ApiError::invalid(&name, format!("{name} must have one element")))?;
        if name == "sampling_parameters" {
            let text = value.as_str().unwrap_or_default();
            let parsed: Result<Map<String, Value>, _> = serde_json::from_str(text);
            fields.extend(parsed.map_err(|e| ApiError::invalid(&name, format!("{name}: {e}")))?);
        } else {
            fields.insert(name, value);
        }
    }
    let (shape, prompts) =
        prompts.ok_or_else(|| ApiError::invalid("text_input", "the tensor text_input is missing"))?;
    let mut body = Value::Object(fields);
    inference::refuse_shapes(&body)?;
    body["prompt"] = prompts.into();
    body["model"] = name.into();
    Ok((shape, body))
}

struct Output {
    name: &'static str,
    is_binary: bool,
}

/// The outputs that are wanted: all, where none is named.
fn outputs(head: &Value) -> ApiResult<Vec<Output>> {
    let by_default = head["parameters"]["binary_data_output"].as_bool().unwrap_or(false);
    let wanted = head["outputs"].as_array().map(Vec::as_slice).unwrap_or_default();
    if wanted.is_empty() {
        return Ok(OUTPUTS.iter().map(|&name| Output { name, is_binary: by_default }).collect());
    }
    let output = |wanted: &Value| {
        let name = wanted["name"].as_str().unwrap_or_default();
        let known = OUTPUTS.iter().find(|&&known| known == name);
        let known = known.ok_or_else(|| ApiError::invalid("outputs", format!("there is no output `{name}`")))?;
        Ok(Output { name: known, is_binary: wanted["parameters"]["binary_data"].as_bool().unwrap_or(by_default) })
    };
    wanted.iter().map(output).collect()
}

fn respond<'a>(
    id: &str,
    name: &str,
    shape: &[u64],
    outputs: impl Iterator<Item = (&'a Output, &'a [String])>,
) -> Response {
    let mut binary = Vec::new();
    let mut list = Vec::new();
    for (output, texts) in outputs {
        let mut tensor = json!({ "name": output.name, "datatype": "BYTES", "shape": shape });
        if output.is_binary {
            let start = binary.len();
            for text in texts {
                binary.extend((text.len() as u32).to_le_bytes());
                binary.extend(text.as_bytes());
            }
            tensor["parameters"] = json!({ "binary_data_size": binary.len() - start });
        } else {
            tensor["data"] = json!(texts);
        }
        list.push(tensor);
    }
    let head = json!({ "id": id, "model_name": name, "model_version": "1", "outputs": list });
    if binary.is_empty() {
        return Json(head).into_response();
    }
    let mut body = head.to_string().into_bytes();
    let headers = [
        (HeaderName::from_static(JSON_LENGTH), body.len().to_string()),
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
    ];
    body.append(&mut binary);
    (headers, body).into_response()
}
