//! Fields on the wire to engine requests: defaults, ranges, limits.
//!
//! Guarantees: what is out of range names its field; nothing reaches the queue that the engine would refuse.
//! The stages of sampling run in this order: penalties, bias, temperature, top-k, top-p, min-p.

use super::app::{Caller, new_id};
use super::error::{ApiError, ApiResult};
use super::fleet::ModelUse;
use super::guard::is_plain_id;
use super::wire::{EarlyStoppingField, EarlyStoppingWord, SamplingFields, StopField};
use crate::engine::handle::LoadedModel;
use crate::ids::TokenId;
use crate::protocol::{BeamParams, Decoding, EarlyStopping, GenerateRequest, SamplingParams, StopRules};
use sha2::{Digest, Sha256};

/// Alternatives per token that a request may ask for.
const MAX_LOGPROBS: u32 = 20;
const MAX_STOPS: usize = 64;
const MAX_CHOICES: u32 = 128;
const BIAS_LIMIT: f32 = 100.0;

/// Fields that both endpoints know and the engine cannot honour, with the values that mean nothing.
pub const UNSUPPORTED: [(&str, fn(&serde_json::Value) -> bool); 7] = [
    ("kv_transfer_params", is_empty),
    ("logits_processors", is_empty),
    ("mm_processor_kwargs", is_empty),
    ("repetition_detection", |_| false),
    ("return_tokens_as_token_ids", |value| *value == false),
    ("spaces_between_special_tokens", |value| value.is_boolean()),
    ("service_tier", |value| value == "auto" || value == "default"),
];

/// The id of an answer: as the client wants it, else a new one.
pub fn answer_id(beginning: &str, fields: &SamplingFields) -> ApiResult<String> {
    match &fields.request_id {
        Some(id) if is_plain_id(id) => Ok(format!("{beginning}{id}")),
        Some(_) => Err(ApiError::invalid("request_id", "request_id must be 1 to 200 visible ASCII characters")),
        None => Ok(new_id(beginning)),
    }
}

/// True for `[]` and `{}`.
pub fn is_empty(value: &serde_json::Value) -> bool {
    is_empty_list(value) || value.as_object().is_some_and(serde_json::Map::is_empty)
}

/// True for `[]`.
pub fn is_empty_list(value: &serde_json::Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty)
}

/// How many alternatives of each prompt token are asked for.
pub fn prompt_logprobs(fields: &SamplingFields) -> ApiResult<Option<u8>> {
    match fields.prompt_logprobs {
        None => Ok(None),
        Some(n) if n > MAX_LOGPROBS => {
            let message = format!("prompt_logprobs must be at most {MAX_LOGPROBS}, not {n}");
            Err(ApiError::invalid("prompt_logprobs", message))
        }
        Some(_) if fields.use_beam_search == Some(true) => {
            Err(ApiError::invalid("prompt_logprobs", "prompt_logprobs and use_beam_search exclude each other"))
        }
        Some(n) => Ok(Some(n as u8)),
    }
}

/// What each endpoint says in its own fields.
pub struct Limits {
    /// `None` leaves it to the context.
    pub max_tokens: Option<u32>,
    /// Used where `max_tokens` is not given, as far as the context allows.
    pub default_max_tokens: Option<u32>,
    pub logprobs: Option<u32>,
    pub logprobs_field: &'static str,
}

/// The engine's request for each prompt, all alike but for the prompt.
pub fn requests(
    fields: &SamplingFields,
    limits: &Limits,
    prompts: Vec<Vec<TokenId>>,
    model: &ModelUse,
    caller: &Caller,
) -> ApiResult<Vec<GenerateRequest>> {
    let sampling = sampling(fields, limits, model)?;
    let decoding = decoding(fields, model)?;
    let stop = stop_rules(fields, limits, model)?;
    let cache_salt = fields.cache_salt.as_deref().map_or(0, salt);
    let request = |mut prompt: Vec<TokenId>| {
        truncate(fields.truncate_prompt_tokens, room_for_prompt(limits, model), &mut prompt)?;
        let room = model.max_model_len.saturating_sub(prompt.len() as u32);
        let mut stop = stop.clone();
        stop.max_tokens = stop.max_tokens.or(limits.default_max_tokens.map(|n| n.min(room.max(1))));
        Ok(GenerateRequest {
            owner: caller.tag(),
            prompt,
            sampling: sampling.clone(),
            stop,
            decoding: decoding.clone(),
            priority: fields.priority.unwrap_or(0),
            cache_salt,
            adapter: model.lora,
        })
    };
    prompts.into_iter().map(request).collect()
}

fn sampling(fields: &SamplingFields, limits: &Limits, model: &LoadedModel) -> ApiResult<SamplingParams> {
    let defaults = &model.defaults;
    let top_k = match fields.top_k {
        None => defaults.top_k.unwrap_or(0),
        Some(k) if (-1..=i64::from(u32::MAX)).contains(&k) => k.max(0) as u32,
        Some(k) => return Err(ApiError::invalid("top_k", format!("top_k must be -1, 0 or more, not {k}"))),
    };
    if let Some(logprobs) = limits.logprobs.filter(|&n| n > MAX_LOGPROBS) {
        let field = limits.logprobs_field;
        return Err(ApiError::invalid(field, format!("{field} must be at most {MAX_LOGPROBS}, not {logprobs}")));
    }
    let params = SamplingParams {
        temperature: fields.temperature.or(defaults.temperature).unwrap_or(1.0),
        top_k,
        top_p: fields.top_p.or(defaults.top_p).unwrap_or(1.0),
        min_p: fields.min_p.or(defaults.min_p).unwrap_or(0.0),
        repetition_penalty: fields.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
        presence_penalty: fields.presence_penalty.unwrap_or(0.0),
        frequency_penalty: fields.frequency_penalty.unwrap_or(0.0),
        logit_bias: logit_bias(fields, model)?,
        seed: fields.seed.map(|seed| seed as u64),
        logprobs: limits.logprobs.map(|n| n as u8),
    };
    match params.validate() {
        Ok(()) => Ok(params),
        Err(invalid) => Err(ApiError::invalid(invalid.field, invalid.to_string())),
    }
}

fn logit_bias(fields: &SamplingFields, model: &LoadedModel) -> ApiResult<Vec<(TokenId, f32)>> {
    let entry = |(token, &bias): (&String, &f32)| {
        let fault = |what: String| ApiError::invalid("logit_bias", format!("logit_bias: {what}"));
        let id: TokenId = token.parse().map_err(|_| fault(format!("`{token}` is not a token id")))?;
        if id >= model.vocab_size {
            return Err(fault(format!("token {id} is outside the vocabulary of {} tokens", model.vocab_size)));
        }
        if !(-BIAS_LIMIT..=BIAS_LIMIT).contains(&bias) {
            return Err(fault(format!("must be between -{BIAS_LIMIT} and {BIAS_LIMIT}, not {bias} (token {id})")));
        }
        Ok((id, bias))
    };
    fields.logit_bias.iter().flatten().map(entry).collect()
}

fn decoding(fields: &SamplingFields, model: &LoadedModel) -> ApiResult<Decoding> {
    let n = fields.n.unwrap_or(1);
    if n == 0 || n > MAX_CHOICES {
        return Err(ApiError::invalid("n", format!("n must be between 1 and {MAX_CHOICES}, not {n}")));
    }
    let best_of = fields.best_of.unwrap_or(n);
    if best_of < n || best_of > MAX_CHOICES {
        let message = format!("best_of must be between n ({n}) and {MAX_CHOICES}, not {best_of}");
        return Err(ApiError::invalid("best_of", message));
    }
    if fields.use_beam_search == Some(true) {
        return Ok(Decoding::Beam(beams(fields, (best_of, n), model)?));
    }
    Ok(Decoding::Sample { n, best_of })
}

/// A search with `width` beams, of which `n` come back.
fn beams(fields: &SamplingFields, (width, n): (u32, u32), model: &LoadedModel) -> ApiResult<BeamParams> {
    if width > model.max_num_seqs {
        let field = if fields.best_of.is_some() { "best_of" } else { "n" };
        let message = format!("{field} must be at most {} with beam search, not {width}", model.max_num_seqs);
        return Err(ApiError::invalid(field, format!("{message}: beams run at once")));
    }
    // Values that leave the distribution as it is say nothing.
    let cuts = [
        ("temperature", fields.temperature.is_some_and(|t| t != 0.0 && t != 1.0)),
        ("top_p", fields.top_p.is_some_and(|p| p != 1.0)),
        ("top_k", fields.top_k.is_some_and(|k| k > 0)),
        ("min_p", fields.min_p.is_some_and(|p| p != 0.0)),
    ];
    if let Some((field, _)) = cuts.into_iter().find(|(_, is_set)| *is_set) {
        let message = format!("{field} has no part in beam search, which takes the most likely tokens: leave it out");
        return Err(ApiError::invalid(field, message));
    }
    let early_stopping = match fields.early_stopping {
        None | Some(EarlyStoppingField::Flag(false)) => EarlyStopping::Heuristic,
        Some(EarlyStoppingField::Flag(true)) => EarlyStopping::AtOnce,
        Some(EarlyStoppingField::Word(EarlyStoppingWord::Never)) => EarlyStopping::Never,
    };
    let length_penalty = fields.length_penalty.unwrap_or(1.0);
    Ok(BeamParams { width, num_return: n, length_penalty, early_stopping })
}

fn stop_rules(fields: &SamplingFields, limits: &Limits, model: &LoadedModel) -> ApiResult<StopRules> {
    let stop_strings = match fields.stop.clone() {
        None => Vec::new(),
        Some(StopField::One(stop)) => vec![stop],
        Some(StopField::Several(stops)) => stops,
    };
    if stop_strings.len() > MAX_STOPS {
        return Err(ApiError::invalid("stop", format!("stop holds more than {MAX_STOPS} strings")));
    }
    if stop_strings.iter().any(String::is_empty) {
        return Err(ApiError::invalid("stop", "stop holds an empty string"));
    }
    let stop_token_ids = fields.stop_token_ids.clone().unwrap_or_default();
    if let Some(id) = stop_token_ids.iter().find(|&&id| id >= model.vocab_size) {
        let message = format!("token {id} of stop_token_ids is outside the vocabulary of {} tokens", model.vocab_size);
        return Err(ApiError::invalid("stop_token_ids", message));
    }
    let min_tokens = fields.min_tokens.unwrap_or(0);
    if let Some(max_tokens) = limits.max_tokens.or(limits.default_max_tokens)
        && min_tokens > max_tokens
    {
        let message = format!("min_tokens must be at most max_tokens ({max_tokens}), not {min_tokens}");
        return Err(ApiError::invalid("min_tokens", message));
    }
    let ignore_eos = fields.ignore_eos.unwrap_or(false);
    Ok(StopRules { max_tokens: limits.max_tokens, min_tokens, stop_token_ids, stop_strings, ignore_eos })
}

/// What the context has for a prompt.
fn room_for_prompt(limits: &Limits, model: &LoadedModel) -> u32 {
    model.max_model_len.saturating_sub(limits.max_tokens.unwrap_or(1))
}

/// Keeps the last tokens of a prompt, where the request says how many; -1 keeps what there is `room` for.
pub fn truncate(keep: Option<i64>, room: u32, prompt: &mut Vec<TokenId>) -> ApiResult<()> {
    let keep = match keep {
        None => return Ok(()),
        Some(-1) => room.max(1) as usize,
        Some(keep) if keep >= 1 => keep as usize,
        Some(keep) => {
            let message = format!("truncate_prompt_tokens must be -1, or 1 or more, not {keep}");
            return Err(ApiError::invalid("truncate_prompt_tokens", message));
        }
    };
    prompt.drain(..prompt.len().saturating_sub(keep));
    Ok(())
}

/// Salts are secrets: what the engine records is a digest.
pub fn salt(text: &str) -> u64 {
    let digest = Sha256::digest(text.as_bytes());
    u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
}
