//! What the engine reports, in words that need no manual.

use super::format;
use crate::engine::handle::LoadedModel;
use crate::protocol::{FinishReason, RunError};
use crate::telemetry::WaitReason;
use std::path::Path;

/// What a model is called. Titles inside of files name training runs as often as models, so that a GGUF file goes by its
/// own name, without the quantisation, which stands beside it.
pub fn model_name(model: &LoadedModel) -> String {
    let path = model.path.as_deref().filter(|p| p.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")));
    let Some(stem) = path.and_then(Path::file_stem).and_then(|s| s.to_str()) else { return model.name.clone() };
    without_quant(stem, &model.quant).to_owned()
}

/// `SmolLM2-135M-Instruct.Q4_1` without `.Q4_1`.
fn without_quant<'a>(stem: &'a str, quant: &str) -> &'a str {
    let at = stem.len().saturating_sub(quant.len());
    match stem.get(at..) {
        Some(tail) if !quant.is_empty() && tail.eq_ignore_ascii_case(quant) => {
            let head = stem[..at].trim_end_matches(['.', '-', '_']);
            if head.is_empty() { stem } else { head }
        }
        _ => stem,
    }
}

/// Why an answer ended. `max_tokens` is the limit that the user set; `is_clamped` says that the context left room for
/// fewer.
pub fn stop_reason(reason: &FinishReason, max_tokens: u32, is_clamped: bool) -> String {
    match reason {
        FinishReason::StopToken(_) => "end of answer".into(),
        FinishReason::StopString(text) => format!("stop string “{text}”"),
        FinishReason::MaxTokens if is_clamped => "context full".into(),
        FinishReason::MaxTokens => format!("max tokens {}", format::count(max_tokens.into())),
        FinishReason::ContextFull => "context full".into(),
        FinishReason::Aborted => "stopped".into(),
        FinishReason::Pinned => "prefix pinned".into(),
    }
}

/// What went wrong and what helps.
pub fn run_error(error: &RunError) -> String {
    let help = match error {
        RunError::NoModel => "Load a model first.",
        RunError::NeverFits { .. } => "Lower max tokens, or load the model with a larger KV cache.",
        RunError::PinLimit { .. } => "Unpin another prefix, or load the model with a larger KV cache.",
        RunError::PrefixLost => "Pin it again.",
        RunError::QueueFull { .. } => "Wait for running chats to finish, then retry.",
        RunError::Corrupted { .. } => "Retry; if it happens again, the adapter's memory may be faulty.",
        RunError::NotFinite { .. } => "The model file may be damaged; try another one.",
        RunError::Engine(_) | RunError::ShutDown => "Reload the model, then retry.",
        RunError::PromptTooLong { .. } | RunError::ContextExceeded { .. } => {
            "Start a new chat or load the model with a larger context."
        }
        RunError::NoHead | RunError::EmptyPrompt | RunError::TokenOutOfRange { .. } | RunError::InvalidParam(_) => {
            return sentence(error);
        }
    };
    format!("{}. {help}", sentence(error))
}

/// Sentence case, as all text that users see.
fn sentence(error: &RunError) -> String {
    let text = error.to_string();
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars).collect(),
        None => text,
    }
}

/// Why a request waits.
pub fn wait_reason(reason: WaitReason) -> String {
    match reason {
        WaitReason::Behind { position } => format!("number {} in the queue", position + 1),
        WaitReason::Blocks { needed, available } => format!(
            "KV cache full: needs {}, {} free",
            format::counted(needed.into(), "block"),
            format::count(available.into())
        ),
        WaitReason::Slots { max_num_seqs } => format!("all {max_num_seqs} places of the batch are taken"),
        WaitReason::Budget => "this step has no room left for its prompt".into(),
        WaitReason::Preemption => "memory was just taken back from another chat".into(),
        WaitReason::Prefix { .. } => "another chat is reading the same beginning, which it will share".into(),
        WaitReason::Share { .. } => "another chat has had less so far and goes first".into(),
        WaitReason::Gang { needed, .. } => format!("its {needed} beams start together, once there is room for all"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_that_was_hit_is_named() {
        let cases = [
            (FinishReason::StopToken(2), false, "end of answer"),
            (FinishReason::StopString("END".into()), false, "stop string “END”"),
            (FinishReason::MaxTokens, false, "max tokens 1,024"),
            (FinishReason::MaxTokens, true, "context full"),
            (FinishReason::ContextFull, false, "context full"),
            (FinishReason::Aborted, false, "stopped"),
        ];
        for (reason, is_clamped, words) in cases {
            assert_eq!(stop_reason(&reason, 1024, is_clamped), words);
        }
    }

    #[test]
    fn a_file_goes_by_its_name_without_the_quantisation() {
        assert_eq!(without_quant("SmolLM2-135M-Instruct.Q4_1", "Q4_1"), "SmolLM2-135M-Instruct");
        assert_eq!(without_quant("model-q8_0", "Q8_0"), "model");
        assert_eq!(without_quant("Q8_0", "Q8_0"), "Q8_0");
        assert_eq!(without_quant("größe", "ße"), "grö");
        assert_eq!(without_quant("model-Q4_K_M", "Q4_K"), "model-Q4_K_M");
    }

    #[test]
    fn errors_say_what_helps() {
        let text = run_error(&RunError::NeverFits { needed: 9, total: 8 });
        assert_eq!(
            text,
            "The request needs 9 KV blocks, the pool has 8. Lower max tokens, or load the model with a larger KV cache."
        );
    }
}
