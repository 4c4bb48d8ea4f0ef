//! Conversations on disk: SQLite in WAL mode, written by one thread.
//!
//! Guarantees: a write never waits for the disk; everything handed over is committed within [`WRITE_EVERY`] plus the
//! time of one transaction, so that a killed process loses at most that; streamed text is merged per message, so the
//! queue is bounded by the text itself. A file that cannot be used (newer version, read-only, damaged) is never
//! changed: the app runs, and [`StoreHealth`] says why nothing is kept. It does not attempt to merge two processes
//! that edit the same chat.

mod sql;

use super::chat::{Chat, ChatId, Message, MessageId, RunRecord};
use rusqlite::{Connection, OpenFlags};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// Writes are gathered for this long and committed together.
pub const WRITE_EVERY: Duration = Duration::from_millis(250);
/// After a failed write (disk full), the same batch is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(2);
/// Name of the file in the data folder.
pub const FILE_NAME: &str = "chats.sqlite";

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the chats were written by a newer version of kvasir (schema {found}, this version knows {known})")]
    Newer { found: usize, known: usize },
    #[error("the chats cannot be read or written: {0}")]
    Sql(#[from] rusqlite::Error),
    #[error("the data folder cannot be used: {1}: {0}")]
    Folder(PathBuf, std::io::Error),
}

/// Whether chats are being kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreHealth {
    Writing,
    /// What is there can be read; nothing is written.
    ReadOnly {
        reason: String,
    },
    /// Neither: chats live until the window closes.
    MemoryOnly {
        reason: String,
    },
    /// The last write failed and is tried again.
    Failing {
        reason: String,
    },
}

/// What was on disk at start.
pub struct Library {
    /// Newest first, messages not loaded.
    pub chats: Vec<Chat>,
    pub settings: BTreeMap<String, String>,
    /// Largest id in use.
    pub last_id: u64,
}

/// A chat without messages, ready to write.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRow {
    pub id: ChatId,
    pub title: String,
    pub created_ms: i64,
    pub updated_ms: i64,
    pub settings_json: String,
    pub cursor: Option<MessageId>,
    pub context_start: Option<MessageId>,
    pub draft: String,
}

impl ChatRow {
    pub fn of(chat: &Chat) -> ChatRow {
        ChatRow {
            id: chat.id,
            title: chat.title.clone(),
            created_ms: chat.created_ms,
            updated_ms: chat.updated_ms,
            settings_json: serde_json::to_string(&chat.settings).expect("plain fields always serialise"),
            cursor: chat.cursor(),
            context_start: chat.context_start,
            draft: chat.draft.clone(),
        }
    }
}

/// One change of what is on disk.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    Chat(ChatRow),
    Draft { chat: ChatId, text: String },
    Deleted { chat: ChatId, is_deleted: bool },
    Message { chat: ChatId, message: Box<Message> },
    RemoveMessage(MessageId),
    AppendText { message: MessageId, delta: String },
    Run { message: MessageId, run: Box<RunRecord> },
    Setting { key: String, value: String },
}

/// The handle that the app holds. Dropping it writes what is left.
pub struct Store {
    shared: Arc<Shared>,
    reader: Option<Connection>,
    writer: Option<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    health: Mutex<StoreHealth>,
}

#[derive(Default)]
struct Queue {
    writes: Vec<Write>,
    is_closing: bool,
    /// Somebody waits in `flush`: do not gather any longer.
    is_urgent: bool,
    is_writing: bool,
}

impl Store {
    /// Opens or creates the file in `dir`. Never fails: what could not be done is in [`Store::health`].
    pub fn open(dir: &Path) -> (Store, Library) {
        let path = dir.join(FILE_NAME);
        match open_for_writing(dir, &path) {
            Ok((writer, reader, library)) => (Store::with_writer(writer, reader), library),
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "chats will not be saved");
                let reason = error.to_string();
                match open_for_reading(&path) {
                    Ok((reader, library)) => {
                        (Store::without_writer(Some(reader), StoreHealth::ReadOnly { reason }), library)
                    }
                    Err(_) => {
                        let library = Library { chats: Vec::new(), settings: BTreeMap::new(), last_id: 0 };
                        (Store::without_writer(None, StoreHealth::MemoryOnly { reason }), library)
                    }
                }
            }
        }
    }

    fn with_writer(writer: Connection, reader: Connection) -> Store {
        let shared = Arc::new(Shared::new(StoreHealth::Writing));
        let thread_shared = shared.clone();
        let spawned =
            std::thread::Builder::new().name("kvasir-store".into()).spawn(move || write_loop(&writer, &thread_shared));
        match spawned {
            Ok(writer) => Store { shared, reader: Some(reader), writer: Some(writer) },
            Err(error) => {
                let reason = format!("the writer thread could not start: {error}");
                Store::without_writer(Some(reader), StoreHealth::ReadOnly { reason })
            }
        }
    }

    fn without_writer(reader: Option<Connection>, health: StoreHealth) -> Store {
        Store { shared: Arc::new(Shared::new(health)), reader, writer: None }
    }

    pub fn health(&self) -> StoreHealth {
        lock(&self.shared.health).clone()
    }

    /// Hands a change to the writer. Ignored when nothing is kept.
    pub fn write(&self, write: Write) {
        if self.writer.is_none() {
            return;
        }
        let mut queue = lock(&self.shared.queue);
        let was_empty = queue.writes.is_empty();
        push_merged(&mut queue.writes, write);
        if was_empty {
            self.shared.changed.notify_all();
        }
    }

    /// The messages of one chat. A few milliseconds at most: one indexed query on a connection of its own, which in
    /// WAL mode does not wait for the writer.
    pub fn read_messages(&self, chat: ChatId) -> Result<Vec<Message>, StoreError> {
        match &self.reader {
            Some(reader) => sql::read_messages(reader, chat),
            None => Ok(Vec::new()),
        }
    }

    /// Waits until everything handed over is on disk, or the writer has failed.
    pub fn flush(&self) {
        if self.writer.is_none() {
            return;
        }
        let mut queue = lock(&self.shared.queue);
        queue.is_urgent = true;
        self.shared.changed.notify_all();
        while (!queue.writes.is_empty() || queue.is_writing) && !self.is_failing() {
            queue = self.shared.changed.wait(queue).unwrap_or_else(|e| e.into_inner());
        }
        queue.is_urgent = false;
    }

    fn is_failing(&self) -> bool {
        matches!(*lock(&self.shared.health), StoreHealth::Failing { .. })
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        lock(&self.shared.queue).is_closing = true;
        self.shared.changed.notify_all();
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the writer of the chats ended with a panic");
        }
    }
}

impl Shared {
    fn new(health: StoreHealth) -> Self {
        Shared { queue: Mutex::new(Queue::default()), changed: Condvar::new(), health: Mutex::new(health) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// Appends a write, folding it into an earlier one where the result is the same.
fn push_merged(writes: &mut Vec<Write>, write: Write) {
    let merged = match &write {
        Write::AppendText { message, delta } => match last_of_message(writes, *message) {
            Some(Write::AppendText { delta: text, .. }) => {
                text.push_str(delta);
                true
            }
            Some(Write::Message { message, .. }) => {
                message.content.push_str(delta);
                true
            }
            _ => false,
        },
        Write::Draft { chat, text } => writes.iter_mut().rev().any(|w| match w {
            Write::Draft { chat: c, text: t } if c == chat => {
                t.clone_from(text);
                true
            }
            _ => false,
        }),
        Write::Setting { key, value } => writes.iter_mut().rev().any(|w| match w {
            Write::Setting { key: k, value: v } if k == key => {
                v.clone_from(value);
                true
            }
            _ => false,
        }),
        _ => false,
    };
    if !merged {
        writes.push(write);
    }
}

/// The newest write that sets or grows the text of this message.
fn last_of_message(writes: &mut [Write], id: MessageId) -> Option<&mut Write> {
    writes.iter_mut().rev().find(|w| match w {
        Write::AppendText { message, .. } | Write::RemoveMessage(message) => *message == id,
        Write::Message { message, .. } => message.id == id,
        _ => false,
    })
}

fn open_for_writing(dir: &Path, path: &Path) -> Result<(Connection, Connection, Library), StoreError> {
    std::fs::create_dir_all(dir).map_err(|e| StoreError::Folder(dir.to_path_buf(), e))?;
    restrict_to_owner(dir);
    let mut conn = Connection::open(path)?;
    // First of all the version: a newer file must not be touched, not even its journal mode.
    let known = sql::MIGRATIONS.len();
    let found = sql::user_version(&conn)?;
    if found > known {
        return Err(StoreError::Newer { found, known });
    }
    conn.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
    conn.pragma_update(None, "synchronous", "NORMAL")?;
    conn.busy_timeout(Duration::from_secs(5))?;
    sql::migrate(&mut conn, path, sql::MIGRATIONS)?;
    sql::settle_after_crash(&mut conn)?;
    restrict_to_owner(path);
    let library = read_library(&conn)?;
    let reader = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    reader.busy_timeout(Duration::from_millis(200))?;
    Ok((conn, reader, library))
}

fn open_for_reading(path: &Path) -> Result<(Connection, Library), StoreError> {
    let reader = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let library = read_library(&reader)?;
    Ok((reader, library))
}

fn read_library(conn: &Connection) -> Result<Library, StoreError> {
    Ok(Library { chats: sql::read_chats(conn)?, settings: sql::read_settings(conn)?, last_id: sql::last_id(conn)? })
}

/// Folder 0700, file 0600: conversations are nobody else's business.
#[cfg(unix)]
fn restrict_to_owner(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let mode = if path.is_dir() { 0o700 } else { 0o600 };
    if let Err(error) = std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)) {
        tracing::warn!(%error, path = %path.display(), "permissions could not be restricted");
    }
}

#[cfg(not(unix))]
fn restrict_to_owner(_path: &Path) {}

fn write_loop(conn: &Connection, shared: &Shared) {
    while let Some(batch) = next_batch(shared) {
        let result = write_batch(conn, &batch);
        let mut queue = lock(&shared.queue);
        queue.is_writing = false;
        let mut health = lock(&shared.health);
        match result {
            Ok(()) => *health = StoreHealth::Writing,
            Err(error) => {
                tracing::warn!(%error, "chats could not be written; trying again");
                *health = StoreHealth::Failing { reason: error.to_string() };
                let mut kept = batch;
                for write in std::mem::take(&mut queue.writes) {
                    push_merged(&mut kept, write);
                }
                queue.writes = kept;
            }
        }
        let is_failing = *health != StoreHealth::Writing;
        drop(health);
        shared.changed.notify_all();
        if is_failing {
            if queue.is_closing {
                return;
            }
            let _ = shared.changed.wait_timeout_while(queue, RETRY_AFTER, |q| !q.is_closing);
        }
    }
}

/// Waits for writes, gathers for [`WRITE_EVERY`], takes them all. `None` when closing and nothing is left.
fn next_batch(shared: &Shared) -> Option<Vec<Write>> {
    let queue = lock(&shared.queue);
    let queue =
        shared.changed.wait_while(queue, |q| q.writes.is_empty() && !q.is_closing).unwrap_or_else(|e| e.into_inner());
    let (mut queue, _) = shared
        .changed
        .wait_timeout_while(queue, WRITE_EVERY, |q| !q.is_closing && !q.is_urgent)
        .unwrap_or_else(|e| e.into_inner());
    if queue.writes.is_empty() {
        return None;
    }
    queue.is_writing = true;
    Some(std::mem::take(&mut queue.writes))
}

fn write_batch(conn: &Connection, batch: &[Write]) -> Result<(), StoreError> {
    let tx = conn.unchecked_transaction()?;
    for write in batch {
        match write {
            Write::Chat(row) => sql::put_chat(&tx, row)?,
            Write::Draft { chat, text } => sql::put_draft(&tx, *chat, text)?,
            Write::Deleted { chat, is_deleted } => sql::set_deleted(&tx, *chat, *is_deleted)?,
            Write::Message { chat, message } => sql::put_message(&tx, *chat, message)?,
            Write::RemoveMessage(message) => sql::remove_message(&tx, *message)?,
            Write::AppendText { message, delta } => sql::append_text(&tx, *message, delta)?,
            Write::Run { message, run } => sql::put_run(&tx, *message, run)?,
            Write::Setting { key, value } => sql::put_setting(&tx, key, value)?,
        };
    }
    tx.commit()?;
    Ok(())
}

#[cfg(test)]
mod tests;
