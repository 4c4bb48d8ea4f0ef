//! Turns become tokens, off the UI thread: the chat template, encoding, and whether the result fits the context.
//!
//! Guarantees: one thread works through jobs in order; a newer count for the same chat replaces one that waits; text is
//! never cut to fit: what does not fit comes back as [`Outcome::TooLong`] with the smallest number of oldest turns whose
//! absence would make it fit. It does not attempt to summarise.

use super::chat::{ChatId, MessageId, Role};
use crate::engine::handle::LoadedModel;
use crate::ids::TokenId;
use crate::tokenizer::AddSpecial;
use crate::tokenizer::chat_template::{ChatTemplate, Now, RenderRequest, TemplateError};
use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// Room that an answer must have for a turn to be sent without asking.
const MIN_ANSWER_TOKENS: u32 = 64;

/// One message to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    pub id: MessageId,
    pub role: Role,
    pub content: String,
}

/// What the tokens are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be submitted as the prompt of this answer.
    Send { answer: MessageId },
    /// The tokens that every conversation with this system prompt begins with, to be pinned.
    Pin,
    /// To be counted; `revision` says what was counted.
    Count { revision: u64 },
}

pub struct Job {
    pub chat: ChatId,
    pub purpose: Purpose,
    pub system_prompt: String,
    pub turns: Vec<Turn>,
    pub max_tokens: u32,
    pub model: Arc<LoadedModel>,
    /// For templates that print the date.
    pub now: Now,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Tokens(Vec<TokenId>),
    /// The prompt leaves no room for an answer. `first_kept` is the first turn to send when `num_turns` oldest are left out;
    /// `None` when even the newest turn alone is too long.
    TooLong {
        needed: u32,
        limit: u32,
        drop: Option<DropTurns>,
    },
    Failed(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropTurns {
    pub num_turns: u32,
    pub first_kept: MessageId,
}

pub struct Done {
    pub chat: ChatId,
    pub purpose: Purpose,
    pub outcome: Outcome,
}

/// Tokens that a prompt and its answer may take together: the context, or the KV pool where that is smaller.
pub fn context_limit(model: &LoadedModel) -> u32 {
    model.max_model_len.min(model.num_blocks.saturating_sub(1).saturating_mul(model.block_size))
}

/// The thread that does it. Dropping it ends the thread after the job in hand.
pub struct PromptWorker {
    shared: Arc<Shared>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    is_closing: bool,
}

/// Results that may wait for the next frame; the worker pauses beyond.
const MAX_RESULTS: usize = 256;

impl PromptWorker {
    /// `waker` is called when a result is there.
    pub fn start(waker: Box<dyn Fn() + Send>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared { queue: Mutex::new(Queue::default()), changed: Condvar::new() });
        let (sender, done) = sync_channel(MAX_RESULTS);
        let thread_shared = shared.clone();
        let thread = std::thread::Builder::new()
            .name("kvasir-prompt".into())
            .spawn(move || work_loop(&thread_shared, &sender, &waker))?;
        Ok(PromptWorker { shared, done, thread: Some(thread) })
    }

    pub fn submit(&self, job: Job) {
        let mut queue = lock(&self.shared.queue);
        if matches!(job.purpose, Purpose::Count { .. }) {
            queue.jobs.retain(|j| !(j.chat == job.chat && matches!(j.purpose, Purpose::Count { .. })));
            queue.jobs.push_back(job);
        } else {
            // Somebody waits for this one: it goes before all counts.
            let at = queue.jobs.iter().position(|j| matches!(j.purpose, Purpose::Count { .. }));
            let at = at.unwrap_or(queue.jobs.len());
            queue.jobs.insert(at, job);
        }
        drop(queue);
        self.shared.changed.notify_one();
    }

    pub fn try_recv(&self) -> Option<Done> {
        self.done.try_recv().ok()
    }
}

impl Drop for PromptWorker {
    fn drop(&mut self) {
        let mut queue = lock(&self.shared.queue);
        queue.is_closing = true;
        queue.jobs.clear();
        drop(queue);
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the prompt thread ended with a panic");
        }
    }
}

fn lock(mutex: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

fn work_loop(shared: &Shared, sender: &SyncSender<Done>, waker: &dyn Fn()) {
    loop {
        let queue = lock(&shared.queue);
        let mut queue =
            shared.changed.wait_while(queue, |q| q.jobs.is_empty() && !q.is_closing).unwrap_or_else(|e| e.into_inner());
        let Some(job) = queue.jobs.pop_front() else { return };
        drop(queue);
        let outcome = prepare(&job);
        if sender.send(Done { chat: job.chat, purpose: job.purpose, outcome }).is_err() {
            return;
        }
        waker();
    }
}

/// Encodes a job; for one that is to be sent, also checks that it fits.
pub fn prepare(job: &Job) -> Outcome {
    if job.purpose == Purpose::Pin {
        return beginning(job).map_or_else(Outcome::Failed, Outcome::Tokens);
    }
    let tokens = match encode(job, &job.turns) {
        Ok(tokens) => tokens,
        Err(error) => return Outcome::Failed(error),
    };
    let limit = context_limit(&job.model);
    let room = job.max_tokens.clamp(1, MIN_ANSWER_TOKENS);
    let needed = tokens.len() as u32 + room;
    if needed <= limit || matches!(job.purpose, Purpose::Count { .. }) {
        return Outcome::Tokens(tokens);
    }
    Outcome::TooLong { needed, limit, drop: turns_to_drop(job, limit.saturating_sub(room)) }
}

/// What two conversations that differ from the first word on have in common.
fn beginning(job: &Job) -> Result<Vec<TokenId>, String> {
    let ask = |content: &str| encode(job, &[Turn { id: MessageId(0), role: Role::User, content: content.into() }]);
    let (mut one, other) = (ask("Why?")?, ask("7 boats")?);
    let common = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
    one.truncate(common);
    Ok(one)
}

/// The fewest oldest turns to leave out, found by halving: a prompt without more turns is never longer.
fn turns_to_drop(job: &Job, limit: u32) -> Option<DropTurns> {
    let starts: Vec<usize> = (1..job.turns.len()).filter(|i| job.turns[*i].role == Role::User).collect();
    let fits = |start: usize| encode(job, &job.turns[start..]).is_ok_and(|t| t.len() as u32 <= limit);
    let at = starts.partition_point(|start| !fits(*start));
    let start = *starts.get(at)?;
    let num_turns = job.turns[..start].iter().filter(|t| t.role == Role::User).count() as u32;
    Some(DropTurns { num_turns, first_kept: job.turns[start].id })
}

fn encode(job: &Job, turns: &[Turn]) -> Result<Vec<TokenId>, String> {
    let system = Some(job.system_prompt.trim()).filter(|s| !s.is_empty());
    let (text, special) = match &job.model.template {
        Some(template) => (render(template, system, turns, job.now).map_err(|e| e.to_string())?, AddSpecial::No),
        None => (plain_text(system, turns), AddSpecial::Yes),
    };
    job.model.tokenizer.encode(&text, special).map_err(|e| e.to_string())
}

/// Applies the template. Some templates refuse a system message; for those it stands at the head of the first message,
/// where their model cards put it.
fn render(template: &ChatTemplate, system: Option<&str>, turns: &[Turn], now: Now) -> Result<String, TemplateError> {
    let extra = BTreeMap::new();
    let apply = |messages: &serde_json::Value| {
        template.render(&RenderRequest { messages, tools: None, add_generation_prompt: true, now, extra: &extra })
    };
    let list = |system: Option<&str>, first_prefix: &str| {
        let head = system.map(|s| serde_json::json!({ "role": "system", "content": s }));
        let rest = turns.iter().enumerate().map(|(i, t)| {
            let prefix = if i == 0 { first_prefix } else { "" };
            serde_json::json!({ "role": t.role.word(), "content": format!("{prefix}{}", t.content) })
        });
        serde_json::Value::Array(head.into_iter().chain(rest).collect())
    };
    match (apply(&list(system, "")), system) {
        (Err(TemplateError::Raised(_)), Some(system)) => apply(&list(None, &format!("{system}\n\n"))),
        (result, _) => result,
    }
}

/// For models without a template: a plain transcript.
fn plain_text(system: Option<&str>, turns: &[Turn]) -> String {
    let mut text = system.map(|s| format!("{s}\n\n")).unwrap_or_default();
    for turn in turns {
        let who = if turn.role == Role::User { "User" } else { "Assistant" };
        text.push_str(&format!("{who}: {}\n", turn.content));
    }
    text.push_str("Assistant:");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::chat_template::SpecialTokens;

    fn turns(texts: &[&str]) -> Vec<Turn> {
        let role = |i: usize| if i.is_multiple_of(2) { Role::User } else { Role::Assistant };
        texts
            .iter()
            .enumerate()
            .map(|(i, t)| Turn { id: MessageId(i as u64 + 1), role: role(i), content: (*t).into() })
            .collect()
    }

    #[test]
    fn a_template_that_refuses_system_messages_gets_it_in_the_first_turn() {
        let source = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}\
                      {% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}";
        let template = ChatTemplate::new(source, SpecialTokens::default()).unwrap();
        let now = Now::parse("2026-01-01").unwrap();
        let text = render(&template, Some("Be brief."), &turns(&["Hi", "Yo", "Bye"]), now).unwrap();
        assert_eq!(text, "[user:Be brief.\n\nHi][assistant:Yo][user:Bye]");
    }

    #[test]
    fn a_model_without_template_gets_a_plain_transcript() {
        assert_eq!(plain_text(Some("S"), &turns(&["a", "b"])), "S\n\nUser: a\nAssistant: b\nAssistant:");
    }
}
