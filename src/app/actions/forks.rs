//! Answers that begin as another one did are forks of it: a regenerated answer, an edited question, a branch of a chat.
//! The engine then shares the other's blocks until the answers go on differently, and Inspect shows the tree.

use crate::app::chat::{ChatId, MessageId, RunStatus};
use crate::app::logic::AppCore;
use crate::engine::Run;
use crate::engine::handle::LoadedModel;
use crate::ids::{RequestId, TokenId};
use crate::protocol::{GenerateRequest, RunError};
use std::collections::VecDeque;
use std::sync::Arc;

/// Prompts kept, and tokens of them all: fewer than the engine knows ended requests by their tokens.
const MAX_ASKED: usize = 64;
const MAX_ASKED_TOKENS: usize = 1 << 18;

/// What was asked of the model that is loaded, the newest last.
#[derive(Default)]
pub(in crate::app) struct Asked {
    model: Option<Arc<LoadedModel>>,
    prompts: VecDeque<Question>,
}

struct Question {
    chat: ChatId,
    answer: MessageId,
    request: RequestId,
    prompt: Vec<TokenId>,
}

impl Asked {
    fn note(&mut self, question: Question) {
        self.prompts.push_back(question);
        let num_tokens = |asked: &Self| asked.prompts.iter().map(|q| q.prompt.len()).sum::<usize>();
        while self.prompts.len() > MAX_ASKED || num_tokens(self) > MAX_ASKED_TOKENS {
            self.prompts.pop_front();
        }
    }
}

/// Queues an answer, as a fork where another one began with the same tokens.
pub(in crate::app) fn submit(
    core: &mut AppCore,
    answer: MessageId,
    mut request: GenerateRequest,
) -> Result<Run, RunError> {
    let is_known = |known: &Arc<LoadedModel>| core.state.model().is_some_and(|model| Arc::ptr_eq(known, model));
    if !core.asked.model.as_ref().is_some_and(is_known) {
        core.asked = Asked { model: core.state.model().cloned(), prompts: VecDeque::new() };
    }
    let chat = ChatId(request.owner.id);
    let prompt = request.prompt.clone();
    let run = match parent(core, chat, &prompt) {
        Some((parent, num_common)) => {
            request.prompt.drain(..num_common);
            core.engine.fork(parent, num_common as u32, request)?
        }
        None => core.engine.submit(request)?,
    };
    core.asked.note(Question { chat, answer, request: run.id(), prompt });
    Ok(run)
}

/// A remote engine says by which request it knows a run once the run has started.
pub(in crate::app) fn learn_request(core: &mut AppCore, answer: MessageId) {
    let request = core.live.get(&answer).and_then(|live| live.run.as_ref()).map(Run::id);
    if let Some(active) = core.state.runs.get_mut(&answer) {
        active.request = request.or(active.request);
    }
}

/// The request that has most of a prompt's beginning in common, and how much: one for another answer of this chat, off the
/// path that is asked about, or of the chat that it was copied from. What came before on the same path is no fork: the
/// prefix cache finds that.
fn parent(core: &AppCore, chat: ChatId, prompt: &[TokenId]) -> Option<(RequestId, usize)> {
    let source = core.state.branch_of.get(&chat).copied();
    let path = core.state.chat(chat)?.path();
    let is_beside = |q: &&Question| (q.chat == chat && !path.contains(&q.answer)) || Some(q.chat) == source;
    let common = |q: &Question| q.prompt.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    let known = core.asked.prompts.iter().filter(is_beside).filter(|q| began(core, q));
    known.map(|q| (q.request, common(q))).filter(|(_, n)| *n > 0).max_by_key(|(_, n)| *n)
}

/// Whether the engine took the request up: one that was refused or failed is not known to it.
fn began(core: &AppCore, question: &Question) -> bool {
    let message = core.state.chat(question.chat).and_then(|chat| chat.message(question.answer));
    message.and_then(|m| m.run.as_ref()).is_some_and(|run| run.status != RunStatus::Failed)
}
