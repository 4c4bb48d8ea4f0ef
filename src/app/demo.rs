//! The demonstration: four chats that share one system prompt, each with its own question, in one batch.

use super::actions::{messages, panes};
use super::chat::{ChatId, RunSettings, RunStatus};
use super::command::UiCommand;
use super::logic::AppCore;
use super::state::{AppState, DockTab, Workspace};
use crate::engine::handle::EngineStatus;

/// Long enough to fill some KV blocks, so that sharing them shows.
const SYSTEM_PROMPT: &str = "You are Kvasir, a patient guide to science and craft. Answer in plain English, in short \
    paragraphs. Start with the one sentence that matters most, then give an example from daily life, and say where your \
    answer stops being true. Never make up names, numbers or sources; say so when you do not know.";

const QUESTIONS: [&str; 4] = [
    "Why is the sky blue?",
    "How does bread dough rise?",
    "Why do cats always land on their feet?",
    "How does a lock on a canal lift a boat?",
];

/// Answer length when a person watches.
pub const MAX_TOKENS_SHOWN: u32 = 256;
/// Answer length when the demo is a check.
pub const MAX_TOKENS_CHECKED: u32 = 48;
/// From here on there is something to see in every chat.
const TOKENS_TO_SEE: u32 = 24;
/// A check that takes longer has failed.
pub const TIMEOUT_S: f64 = 300.0;

/// Opens the four chats side by side and asks. Does nothing without a model.
pub fn start_chats(core: &mut AppCore, max_tokens: u32) {
    if core.state.model().is_none() {
        return;
    }
    let settings =
        RunSettings { system_prompt: SYSTEM_PROMPT.into(), max_tokens, seed: Some(7), ..RunSettings::balanced() };
    let chats: Vec<ChatId> = QUESTIONS.iter().map(|_| core.new_chat(settings.clone())).collect();
    core.state.panes.chats = chats.clone();
    core.state.panes.focused = 0;
    core.state.workspace = Workspace::Chat;
    core.state.dock_tab = DockTab::Live;
    panes::remember(core);
    // Pinned first, the prompt is read once and stays whatever happens to the chats.
    core.apply(UiCommand::PinSystemPrompt(chats[0]));
    for (chat, question) in chats.into_iter().zip(QUESTIONS) {
        messages::send_text(core, chat, question);
    }
}

/// Follows a demo that was asked for on the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Demo {
    max_tokens: u32,
    /// Shown once the chats have begun, instead of the Chat workspace.
    workspace: Option<Workspace>,
    started: Option<Started>,
    outcome: Option<Result<(), String>>,
}

#[derive(Clone, Debug, PartialEq)]
struct Started {
    chats: Vec<ChatId>,
}

impl Demo {
    pub fn new(is_check: bool, workspace: Option<Workspace>) -> Self {
        let max_tokens = if is_check { MAX_TOKENS_CHECKED } else { MAX_TOKENS_SHOWN };
        Demo { max_tokens, workspace, started: None, outcome: None }
    }

    /// Starts the chats once a model is there, and watches them. The result, once known, stays.
    pub fn poll(&mut self, core: &mut AppCore) -> Option<Result<(), String>> {
        if self.outcome.is_none() {
            self.outcome = self.advance(core);
        }
        self.outcome.clone()
    }

    /// True once every chat of the demo has text worth looking at.
    pub fn is_in_full_swing(&self, state: &AppState) -> bool {
        let shows_text = |id: &ChatId| {
            let answer = state.chat(*id).and_then(AppState::last_answer).and_then(|m| m.run.as_ref());
            answer.is_some_and(|r| r.output_tokens >= TOKENS_TO_SEE || r.status != RunStatus::Running)
        };
        self.started.as_ref().is_some_and(|s| s.chats.iter().all(shows_text))
    }

    fn advance(&mut self, core: &mut AppCore) -> Option<Result<(), String>> {
        if core.state.clock.seconds > TIMEOUT_S {
            return Some(Err(format!("the demo did not end within {TIMEOUT_S} seconds")));
        }
        match &self.started {
            Some(started) => outcome_of(&core.state, &started.chats),
            None => match &core.state.engine {
                EngineStatus::Ready(_) => {
                    start_chats(core, self.max_tokens);
                    core.state.workspace = self.workspace.unwrap_or(core.state.workspace);
                    self.started = Some(Started { chats: core.state.panes.chats.clone() });
                    None
                }
                EngineStatus::Failed { message, .. } => Some(Err(message.clone())),
                EngineStatus::NoModel | EngineStatus::Loading { .. } => None,
            },
        }
    }
}

/// `None` while an answer is under way.
fn outcome_of(state: &AppState, chats: &[ChatId]) -> Option<Result<(), String>> {
    for id in chats {
        let Some(chat) = state.chat(*id) else { return Some(Err("a chat of the demo was deleted".into())) };
        let Some(run) = AppState::last_answer(chat).and_then(|m| m.run.as_ref()) else {
            return Some(Err(format!("“{}” got no answer", chat.title)));
        };
        match run.status {
            RunStatus::Running => return None,
            RunStatus::Failed => {
                return Some(Err(run.error.clone().unwrap_or_else(|| format!("“{}” failed", chat.title))));
            }
            RunStatus::Done if run.output_tokens == 0 => {
                return Some(Err(format!("“{}” got an answer without a token", chat.title)));
            }
            RunStatus::Done => {}
            RunStatus::Stopped | RunStatus::Interrupted => {
                return Some(Err(format!("“{}” was {}", chat.title, run.status.word())));
            }
        }
    }
    Some(Ok(()))
}
