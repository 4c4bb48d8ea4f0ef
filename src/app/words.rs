//! What the engine reports, in words that need no manual.

use super::format;
use crate::protocol::{FinishReason, RunError};
use crate::telemetry::WaitReason;

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
    }
}

/// What went wrong and what helps.
pub fn run_error(error: &RunError) -> String {
    let help = match error {
        RunError::NoModel => "Load a model first.",
        RunError::NeverFits { .. } => "Lower max tokens, or load the model with a larger KV cache.",
        RunError::QueueFull { .. } => "Wait for running chats to finish, then retry.",
        RunError::NotFinite { .. } => "The model file may be damaged; try another one.",
        RunError::Engine(_) | RunError::ShutDown => "Reload the model, then retry.",
        RunError::PromptTooLong { .. } | RunError::ContextExceeded { .. } => {
            "Start a new chat or load the model with a larger context."
        }
        RunError::EmptyPrompt | RunError::TokenOutOfRange { .. } | RunError::InvalidParam(_) => return sentence(error),
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
    fn errors_say_what_helps() {
        let text = run_error(&RunError::NeverFits { needed: 9, total: 8 });
        assert_eq!(
            text,
            "The request needs 9 KV blocks, the pool has 8. Lower max tokens, or load the model with a larger KV cache."
        );
    }
}
