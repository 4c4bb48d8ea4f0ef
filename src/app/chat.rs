//! A chat: a tree of messages, a cursor that picks the active path, and what each answer cost.
//!
//! Guarantees: message ids ascend in order of creation; the path runs from the root to the cursor; editing or
//! regenerating adds a sibling and never changes or removes a message that was sent. It does not attempt to know
//! the engine, the disk or the window.

use serde::{Deserialize, Serialize};

/// A conversation. It is also the owner id of its requests, so that its hue is the same everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChatId(pub u64);

/// A message; unique over all chats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MessageId(pub u64);

/// Who speaks. The system prompt is a setting of the chat and not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    User,
    Assistant,
}

impl Role {
    /// The word that chat templates and the store use.
    pub fn word(self) -> &'static str {
        match self {
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }

    pub fn from_word(word: &str) -> Option<Role> {
        match word {
            "user" => Some(Role::User),
            "assistant" => Some(Role::Assistant),
            _ => None,
        }
    }
}

/// How an answer stands, as kept on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStatus {
    /// Being prepared, queued, read or written now.
    Running,
    /// Ended by itself or at a limit.
    Done,
    /// Ended by the user; the text so far is kept.
    Stopped,
    Failed,
    /// The app ended while it was being written.
    Interrupted,
}

impl RunStatus {
    pub fn word(self) -> &'static str {
        match self {
            RunStatus::Running => "running",
            RunStatus::Done => "done",
            RunStatus::Stopped => "stopped",
            RunStatus::Failed => "failed",
            RunStatus::Interrupted => "interrupted",
        }
    }

    /// Unknown words come from a newer version; such a run is at least not running here.
    pub fn from_word(word: &str) -> RunStatus {
        match word {
            "running" => RunStatus::Running,
            "done" => RunStatus::Done,
            "stopped" => RunStatus::Stopped,
            "failed" => RunStatus::Failed,
            _ => RunStatus::Interrupted,
        }
    }
}

/// What one answer is and what it cost. One per assistant message.
#[derive(Clone, Debug, PartialEq)]
pub struct RunRecord {
    pub status: RunStatus,
    /// Name of the model that wrote it.
    pub model: String,
    /// Why it ended, in words: "end of answer", "max tokens 1024".
    pub stop_reason: String,
    /// Set when it failed.
    pub error: Option<String>,
    pub prompt_tokens: u32,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: u32,
    pub output_tokens: u32,
    pub preemptions: u32,
    pub ttft_us: u64,
    pub decode_us: u64,
    pub first_step: u64,
    pub last_step: u64,
}

impl RunRecord {
    pub fn started(model: String) -> Self {
        RunRecord {
            status: RunStatus::Running,
            model,
            stop_reason: String::new(),
            error: None,
            prompt_tokens: 0,
            cached_tokens: 0,
            output_tokens: 0,
            preemptions: 0,
            ttft_us: 0,
            decode_us: 0,
            first_step: 0,
            last_step: 0,
        }
    }

    /// Tokens per second from the first token to the last; `None` below two tokens.
    pub fn tokens_per_second(&self) -> Option<f32> {
        let gaps = self.output_tokens.checked_sub(1).filter(|g| *g > 0)?;
        (self.decode_us > 0).then(|| gaps as f32 / (self.decode_us as f32 / 1e6))
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub id: MessageId,
    /// `None` for the first message.
    pub parent: Option<MessageId>,
    pub role: Role,
    pub content: String,
    /// Milliseconds since 1970 (UTC).
    pub created_ms: i64,
    /// Set for assistant messages.
    pub run: Option<RunRecord>,
}

impl Message {
    pub fn is_running(&self) -> bool {
        self.run.as_ref().is_some_and(|r| r.status == RunStatus::Running)
    }
}

/// What a chat asks of the engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSettings {
    pub system_prompt: String,
    pub temperature: f32,
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    pub min_p: f32,
    pub max_tokens: u32,
    /// `None` draws a new one for each answer.
    pub seed: Option<u64>,
}

impl RunSettings {
    /// What a new chat starts with.
    pub fn balanced() -> Self {
        RunSettings {
            system_prompt: "You are a helpful assistant.".into(),
            temperature: 0.7,
            top_p: 0.95,
            top_k: 40,
            min_p: 0.0,
            max_tokens: 1024,
            seed: None,
        }
    }
}

/// A tree of messages with one active path.
#[derive(Clone, Debug, PartialEq)]
pub struct Chat {
    pub id: ChatId,
    pub title: String,
    pub created_ms: i64,
    pub updated_ms: i64,
    pub settings: RunSettings,
    /// Text in the composer, kept over restarts.
    pub draft: String,
    /// Turns before this message are shown but not sent.
    pub context_start: Option<MessageId>,
    /// False until the messages were read from disk.
    pub is_loaded: bool,
    messages: Vec<Message>, // ascending ids
    path: Vec<MessageId>,   // root to cursor
    cursor: Option<MessageId>,
}

/// The title of a chat that has no message yet.
pub const UNTITLED: &str = "New chat";
const TITLE_CHARS: usize = 42;

impl Chat {
    pub fn new(id: ChatId, now_ms: i64, settings: RunSettings) -> Self {
        Chat {
            id,
            title: UNTITLED.into(),
            created_ms: now_ms,
            updated_ms: now_ms,
            settings,
            draft: String::new(),
            context_start: None,
            is_loaded: true,
            messages: Vec::new(),
            path: Vec::new(),
            cursor: None,
        }
    }

    /// A chat of which only the heading was read; [`Chat::restore_messages`] brings the rest.
    pub fn unloaded(heading: Chat, cursor: Option<MessageId>) -> Self {
        Chat { is_loaded: false, cursor, ..heading }
    }

    /// Puts messages read from disk in place. Messages whose parent is missing become roots.
    pub fn restore_messages(&mut self, mut messages: Vec<Message>, cursor: Option<MessageId>) {
        messages.sort_by_key(|m| m.id);
        messages.dedup_by_key(|m| m.id);
        let known: std::collections::HashSet<MessageId> = messages.iter().map(|m| m.id).collect();
        for message in &mut messages {
            // A parent is always older than its child, so a path cannot run in a circle.
            message.parent = message.parent.filter(|p| known.contains(p) && *p < message.id);
        }
        self.messages = messages;
        self.is_loaded = true;
        let cursor = cursor.filter(|c| known.contains(c)).or(self.messages.last().map(|m| m.id));
        self.set_cursor(cursor);
    }

    /// All messages of all branches, ascending ids.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The active path, root first.
    pub fn path(&self) -> &[MessageId] {
        &self.path
    }

    pub fn cursor(&self) -> Option<MessageId> {
        self.cursor
    }

    pub fn message(&self, id: MessageId) -> Option<&Message> {
        self.messages.binary_search_by_key(&id, |m| m.id).ok().map(|i| &self.messages[i])
    }

    pub fn message_mut(&mut self, id: MessageId) -> Option<&mut Message> {
        self.messages.binary_search_by_key(&id, |m| m.id).ok().map(|i| &mut self.messages[i])
    }

    /// The message that is being written on the active path, if any.
    pub fn running_message(&self) -> Option<&Message> {
        self.path.last().and_then(|id| self.message(*id)).filter(|m| m.is_running())
    }

    /// Adds a message and moves the cursor to it. `id` must be larger than all before.
    pub fn add(&mut self, message: Message) {
        assert!(self.messages.last().is_none_or(|m| m.id < message.id), "message ids ascend");
        assert!(message.parent.is_none_or(|p| self.message(p).is_some()), "the parent is in this chat");
        if self.title == UNTITLED && message.role == Role::User {
            self.title = title_of(&message.content);
        }
        self.updated_ms = message.created_ms;
        let id = message.id;
        self.messages.push(message);
        self.set_cursor(Some(id));
    }

    /// Takes a message without children back out; the cursor moves to its parent.
    pub fn remove_leaf(&mut self, id: MessageId) -> Option<Message> {
        if self.messages.iter().any(|m| m.parent == Some(id)) {
            return None;
        }
        let idx = self.messages.binary_search_by_key(&id, |m| m.id).ok()?;
        let message = self.messages.remove(idx);
        if self.cursor == Some(id) {
            let sibling = self.messages.iter().rev().find(|m| m.parent == message.parent).map(|m| m.id);
            let cursor = message.parent.or(sibling);
            self.set_cursor(cursor);
        }
        Some(message)
    }

    /// Ends the active path at this message.
    pub fn set_cursor(&mut self, cursor: Option<MessageId>) {
        self.cursor = cursor;
        self.path.clear();
        let mut at = cursor;
        while let Some(id) = at {
            self.path.push(id);
            at = self.message(id).and_then(|m| m.parent);
        }
        self.path.reverse();
    }

    /// Messages with the same parent and role, this one included, oldest first.
    pub fn siblings(&self, id: MessageId) -> Vec<MessageId> {
        let Some(message) = self.message(id) else { return Vec::new() };
        self.messages.iter().filter(|m| m.parent == message.parent && m.role == message.role).map(|m| m.id).collect()
    }

    /// Shows another branch: the sibling `offset` places on, followed down to its newest leaf.
    pub fn select_sibling(&mut self, id: MessageId, offset: isize) {
        let siblings = self.siblings(id);
        let Some(at) = siblings.iter().position(|s| *s == id) else { return };
        let Some(target) = at.checked_add_signed(offset).and_then(|i| siblings.get(i)) else { return };
        let mut leaf = *target;
        while let Some(child) = self.messages.iter().rev().find(|m| m.parent == Some(leaf)) {
            leaf = child.id;
        }
        self.set_cursor(Some(leaf));
    }

    /// The messages that a request would send: the active path up to and without `until`, from `context_start` on.
    /// Empty answers (failed before the first token) are left out.
    pub fn turns_before(&self, until: Option<MessageId>) -> Vec<&Message> {
        let start = self.context_start.and_then(|c| self.path.iter().position(|id| *id == c)).unwrap_or(0);
        self.path[start..]
            .iter()
            .take_while(|id| Some(**id) != until)
            .filter_map(|id| self.message(*id))
            .filter(|m| !(m.role == Role::Assistant && m.content.is_empty()))
            .collect()
    }

    /// True for a message on the path that is shown but not sent.
    pub fn is_dropped(&self, id: MessageId) -> bool {
        let Some(start) = self.context_start else { return false };
        let at = self.path.iter().position(|p| *p == start);
        let this = self.path.iter().position(|p| *p == id);
        matches!((this, at), (Some(this), Some(at)) if this < at)
    }
}

/// The first words of a message, on one line.
pub fn title_of(text: &str) -> String {
    let line = text.lines().map(str::trim).find(|l| !l.is_empty()).unwrap_or("");
    if line.is_empty() {
        return UNTITLED.into();
    }
    if line.chars().count() <= TITLE_CHARS {
        return line.into();
    }
    let cut: String = line.chars().take(TITLE_CHARS - 1).collect();
    let whole_words = cut.rsplit_once(' ').map_or(cut.as_str(), |(head, _)| head);
    let head = if whole_words.chars().count() * 2 >= TITLE_CHARS { whole_words } else { &cut };
    format!("{}…", head.trim_end())
}

/// The name of a copy: `Poem` becomes `Poem (2)`, then `Poem (3)`; suffixes never pile up.
pub fn numbered_title(title: &str, taken: &[&str]) -> String {
    let base = match title.rsplit_once(" (") {
        Some((head, tail)) if tail.strip_suffix(')').is_some_and(|n| n.parse::<u32>().is_ok()) => head,
        _ => title,
    };
    let mut number = 2u32;
    loop {
        let name = format!("{base} ({number})");
        if !taken.contains(&name.as_str()) {
            return name;
        }
        number += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(id: u64, parent: Option<u64>, role: Role, content: &str) -> Message {
        Message {
            id: MessageId(id),
            parent: parent.map(MessageId),
            role,
            content: content.into(),
            created_ms: id as i64,
            run: (role == Role::Assistant).then(|| RunRecord::started("m".into())),
        }
    }

    fn chat() -> Chat {
        let mut chat = Chat::new(ChatId(1), 0, RunSettings::balanced());
        chat.add(message(1, None, Role::User, "Hello there"));
        chat.add(message(2, Some(1), Role::Assistant, "Hi"));
        chat.add(message(3, Some(2), Role::User, "More"));
        chat.add(message(4, Some(3), Role::Assistant, "Sure"));
        chat
    }

    fn ids(path: &[MessageId]) -> Vec<u64> {
        path.iter().map(|m| m.0).collect()
    }

    #[test]
    fn regenerating_adds_a_sibling_and_both_can_be_shown() {
        let mut chat = chat();
        chat.add(message(5, Some(1), Role::Assistant, "Hello again"));
        assert_eq!(ids(chat.path()), [1, 5]);
        assert_eq!(ids(&chat.siblings(MessageId(5))), [2, 5]);
        chat.select_sibling(MessageId(5), -1);
        assert_eq!(ids(chat.path()), [1, 2, 3, 4], "the older branch is followed to its leaf");
        chat.select_sibling(MessageId(2), -1);
        assert_eq!(ids(chat.path()), [1, 2, 3, 4], "there is nothing before the first");
    }

    #[test]
    fn title_comes_from_the_first_user_message_only() {
        assert_eq!(chat().title, "Hello there");
        assert_eq!(title_of("\n  first line \nsecond"), "first line");
        assert_eq!(title_of("  \n "), UNTITLED);
        let long = title_of("please explain how lifetimes and borrowing work in large programs");
        assert!(long.chars().count() <= TITLE_CHARS && long.ends_with('…'), "{long}");
        assert!(title_of(&"x".repeat(100)).chars().count() <= TITLE_CHARS);
    }

    #[test]
    fn copies_are_numbered_without_piling_up() {
        assert_eq!(numbered_title("Poem", &["Poem"]), "Poem (2)");
        assert_eq!(numbered_title("Poem (2)", &["Poem", "Poem (2)"]), "Poem (3)");
        assert_eq!(numbered_title("f (x)", &[]), "f (x) (2)");
    }

    #[test]
    fn dropped_turns_are_not_sent_but_stay_on_the_path() {
        let mut chat = chat();
        chat.context_start = Some(MessageId(3));
        let sent: Vec<u64> = chat.turns_before(Some(MessageId(4))).iter().map(|m| m.id.0).collect();
        assert_eq!(sent, [3]);
        assert!(chat.is_dropped(MessageId(2)) && !chat.is_dropped(MessageId(3)));
        assert_eq!(chat.path().len(), 4);
    }

    #[test]
    fn removing_a_leaf_moves_the_cursor_to_its_parent() {
        let mut chat = chat();
        assert!(chat.remove_leaf(MessageId(3)).is_none(), "it has a child");
        assert_eq!(chat.remove_leaf(MessageId(4)).map(|m| m.id), Some(MessageId(4)));
        assert_eq!(chat.cursor(), Some(MessageId(3)));
    }

    #[test]
    fn restoring_survives_missing_parents_and_bad_cursors() {
        let mut chat = Chat::new(ChatId(1), 0, RunSettings::balanced());
        let rows = vec![
            message(7, Some(9), Role::User, "a"),
            message(9, Some(7), Role::Assistant, "b"),
            message(10, Some(99), Role::User, "c"),
        ];
        chat.restore_messages(rows, Some(MessageId(1234)));
        assert_eq!(ids(chat.path()), [10]);
        chat.set_cursor(Some(MessageId(9)));
        assert_eq!(ids(chat.path()), [7, 9]);
    }

    #[test]
    fn speed_needs_two_tokens() {
        let mut run = RunRecord::started("m".into());
        run.output_tokens = 1;
        assert_eq!(run.tokens_per_second(), None);
        run.output_tokens = 11;
        run.decode_us = 1_000_000;
        assert_eq!(run.tokens_per_second(), Some(10.0));
    }
}
