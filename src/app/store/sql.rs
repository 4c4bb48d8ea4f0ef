//! The tables, their migrations, and the statements that read and write them.
//!
//! Guarantees: `PRAGMA user_version` names the schema; each migration runs in a transaction after a backup of the
//! whole file. Rows that cannot be understood are skipped with their id in the log, never a reason not to start.

use super::StoreError;
use crate::app::chat::{Chat, ChatId, Message, MessageId, Role, RunRecord, RunSettings, RunStatus};
use rusqlite::{Connection, OptionalExtension, Row, params};
use std::collections::BTreeMap;
use std::path::Path;

/// Entry `n` brings a file from version `n` to `n + 1`.
pub(super) const MIGRATIONS: &[&str] = &["
    CREATE TABLE chat(
        id INTEGER PRIMARY KEY, title TEXT NOT NULL, created_ms INTEGER NOT NULL, updated_ms INTEGER NOT NULL,
        settings_json TEXT NOT NULL, cursor_message INTEGER, context_start INTEGER,
        draft TEXT NOT NULL DEFAULT '', deleted INTEGER NOT NULL DEFAULT 0);
    CREATE TABLE message(
        id INTEGER PRIMARY KEY, chat INTEGER NOT NULL, parent INTEGER, role TEXT NOT NULL, content TEXT NOT NULL,
        created_ms INTEGER NOT NULL);
    CREATE INDEX message_of_chat ON message(chat);
    CREATE TABLE run(
        message INTEGER PRIMARY KEY, model TEXT NOT NULL, status TEXT NOT NULL, stop_reason TEXT NOT NULL, error TEXT,
        prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
        preemptions INTEGER NOT NULL, ttft_us INTEGER NOT NULL, decode_us INTEGER NOT NULL,
        first_step INTEGER NOT NULL, last_step INTEGER NOT NULL);
    CREATE TABLE setting(key TEXT PRIMARY KEY, value TEXT NOT NULL);
    "];

const BACKUPS_KEPT: usize = 3;

/// Brings the file to the newest schema. The error for a file of a newer version names both versions.
pub(super) fn migrate(conn: &mut Connection, path: &Path, migrations: &[&str]) -> Result<(), StoreError> {
    let newest = migrations.len();
    let version = user_version(conn)?;
    if version > newest {
        return Err(StoreError::Newer { found: version, known: newest });
    }
    if version > 0 && version < newest {
        back_up(conn, path, version)?;
    }
    for (from, sql) in migrations.iter().enumerate().skip(version) {
        let tx = conn.transaction()?;
        tx.execute_batch(sql)?;
        tx.pragma_update(None, "user_version", from as i64 + 1)?;
        tx.commit()?;
    }
    Ok(())
}

pub(super) fn user_version(conn: &Connection) -> Result<usize, StoreError> {
    Ok(conn.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0))?.max(0) as usize)
}

/// Copies the file to `chats.<version>.bak` (with a number if that exists) and keeps the newest few.
fn back_up(conn: &Connection, path: &Path, version: usize) -> Result<(), StoreError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let mut target = dir.join(format!("chats.{version}.bak"));
    let mut number = 1;
    while target.exists() {
        target = dir.join(format!("chats.{version}-{number}.bak"));
        number += 1;
    }
    conn.execute("VACUUM INTO ?1", [target.to_string_lossy().as_ref()])?;
    let mut backups: Vec<_> = std::fs::read_dir(dir)
        .map_err(|e| StoreError::Folder(dir.to_path_buf(), e))?
        .filter_map(Result::ok)
        .filter(|e| {
            let name = e.file_name().to_string_lossy().into_owned();
            name.starts_with("chats.") && name.ends_with(".bak")
        })
        .filter_map(|e| Some((e.metadata().ok()?.modified().ok()?, e.path())))
        .collect();
    backups.sort();
    let surplus = backups.len().saturating_sub(BACKUPS_KEPT);
    for (_, old) in &backups[..surplus] {
        if let Err(error) = std::fs::remove_file(old) {
            tracing::warn!(%error, path = %old.display(), "an old backup could not be removed");
        }
    }
    Ok(())
}

/// Answers that were being written when the app ended are marked so; chats deleted last time are removed for good.
pub(super) fn settle_after_crash(conn: &mut Connection) -> Result<(), StoreError> {
    let tx = conn.transaction()?;
    tx.execute("UPDATE run SET status = 'interrupted' WHERE status = 'running'", [])?;
    tx.execute(
        "DELETE FROM run WHERE message IN
         (SELECT id FROM message WHERE chat IN (SELECT id FROM chat WHERE deleted = 1))",
        [],
    )?;
    tx.execute("DELETE FROM message WHERE chat IN (SELECT id FROM chat WHERE deleted = 1)", [])?;
    tx.execute("DELETE FROM chat WHERE deleted = 1", [])?;
    tx.commit()?;
    Ok(())
}

/// All chats without their messages, newest first.
pub(super) fn read_chats(conn: &Connection) -> Result<Vec<Chat>, StoreError> {
    let mut statement = conn.prepare(
        "SELECT id, title, created_ms, updated_ms, settings_json, cursor_message, context_start, draft
         FROM chat WHERE deleted = 0 ORDER BY updated_ms DESC, id DESC",
    )?;
    let chats = statement.query_map([], chat_of_row)?.collect::<Result<Vec<_>, _>>()?;
    Ok(chats)
}

fn chat_of_row(row: &Row<'_>) -> rusqlite::Result<Chat> {
    let id = ChatId(row.get::<_, i64>(0)? as u64);
    let settings: String = row.get(4)?;
    let settings = serde_json::from_str(&settings).unwrap_or_else(|error| {
        tracing::warn!(%error, chat = id.0, "the settings of a chat could not be read; it gets the usual ones");
        RunSettings::balanced()
    });
    let message_id = |v: Option<i64>| v.map(|v| MessageId(v as u64));
    let mut heading = Chat::new(id, row.get(2)?, settings);
    heading.title = row.get(1)?;
    heading.updated_ms = row.get(3)?;
    heading.draft = row.get(7)?;
    heading.context_start = message_id(row.get(6)?);
    Ok(Chat::unloaded(heading, message_id(row.get(5)?)))
}

/// The messages of one chat with their runs.
pub(super) fn read_messages(conn: &Connection, chat: ChatId) -> Result<Vec<Message>, StoreError> {
    let mut statement = conn.prepare_cached(
        "SELECT m.id, m.parent, m.role, m.content, m.created_ms, r.model, r.status, r.stop_reason, r.error,
                r.prompt_tokens, r.cached_tokens, r.output_tokens, r.preemptions, r.ttft_us, r.decode_us,
                r.first_step, r.last_step
         FROM message m LEFT JOIN run r ON r.message = m.id WHERE m.chat = ?1 ORDER BY m.id",
    )?;
    let rows = statement.query_map([chat.0 as i64], message_of_row)?.collect::<Result<Vec<_>, _>>()?;
    Ok(rows.into_iter().flatten().collect())
}

fn message_of_row(row: &Row<'_>) -> rusqlite::Result<Option<Message>> {
    let id = row.get::<_, i64>(0)? as u64;
    let role: String = row.get(2)?;
    let Some(role) = Role::from_word(&role) else {
        tracing::warn!(message = id, role, "a message with an unknown role is not shown");
        return Ok(None);
    };
    let model: Option<String> = row.get(5)?;
    let run = match model {
        Some(model) => Some(RunRecord {
            model,
            status: RunStatus::from_word(&row.get::<_, String>(6)?),
            stop_reason: row.get(7)?,
            error: row.get(8)?,
            prompt_tokens: row.get(9)?,
            cached_tokens: row.get(10)?,
            output_tokens: row.get(11)?,
            preemptions: row.get(12)?,
            ttft_us: row.get::<_, i64>(13)? as u64,
            decode_us: row.get::<_, i64>(14)? as u64,
            first_step: row.get::<_, i64>(15)? as u64,
            last_step: row.get::<_, i64>(16)? as u64,
        }),
        None => None,
    };
    Ok(Some(Message {
        id: MessageId(id),
        parent: row.get::<_, Option<i64>>(1)?.map(|p| MessageId(p as u64)),
        role,
        content: row.get(3)?,
        created_ms: row.get(4)?,
        run,
    }))
}

pub(super) fn read_settings(conn: &Connection) -> Result<BTreeMap<String, String>, StoreError> {
    let mut statement = conn.prepare("SELECT key, value FROM setting")?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// The largest id in use, 0 in an empty file.
pub(super) fn last_id(conn: &Connection) -> Result<u64, StoreError> {
    let last: Option<i64> = conn
        .query_row("SELECT max(id) FROM (SELECT id FROM chat UNION ALL SELECT id FROM message)", [], |row| row.get(0))
        .optional()?
        .flatten();
    Ok(last.unwrap_or(0).max(0) as u64)
}

pub(super) fn put_chat(conn: &Connection, row: &super::ChatRow) -> rusqlite::Result<usize> {
    conn.prepare_cached(
        "INSERT INTO chat(id, title, created_ms, updated_ms, settings_json, cursor_message, context_start, draft)
         VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT(id) DO UPDATE SET title = excluded.title,
         updated_ms = excluded.updated_ms, settings_json = excluded.settings_json,
         cursor_message = excluded.cursor_message, context_start = excluded.context_start, draft = excluded.draft",
    )?
    .execute(params![
        row.id.0 as i64,
        row.title,
        row.created_ms,
        row.updated_ms,
        row.settings_json,
        row.cursor.map(|m| m.0 as i64),
        row.context_start.map(|m| m.0 as i64),
        row.draft,
    ])
}

pub(super) fn put_message(conn: &Connection, chat: ChatId, message: &Message) -> rusqlite::Result<usize> {
    conn.prepare_cached(
        "INSERT OR REPLACE INTO message(id, chat, parent, role, content, created_ms) VALUES(?1, ?2, ?3, ?4, ?5, ?6)",
    )?
    .execute(params![
        message.id.0 as i64,
        chat.0 as i64,
        message.parent.map(|p| p.0 as i64),
        message.role.word(),
        message.content,
        message.created_ms,
    ])?;
    match &message.run {
        Some(run) => put_run(conn, message.id, run),
        None => Ok(0),
    }
}

pub(super) fn put_run(conn: &Connection, message: MessageId, run: &RunRecord) -> rusqlite::Result<usize> {
    conn.prepare_cached(
        "INSERT OR REPLACE INTO run(message, model, status, stop_reason, error, prompt_tokens, cached_tokens,
         output_tokens, preemptions, ttft_us, decode_us, first_step, last_step)
         VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
    )?
    .execute(params![
        message.0 as i64,
        run.model,
        run.status.word(),
        run.stop_reason,
        run.error,
        run.prompt_tokens,
        run.cached_tokens,
        run.output_tokens,
        run.preemptions,
        run.ttft_us as i64,
        run.decode_us as i64,
        run.first_step as i64,
        run.last_step as i64,
    ])
}

pub(super) fn append_text(conn: &Connection, message: MessageId, delta: &str) -> rusqlite::Result<usize> {
    conn.prepare_cached("UPDATE message SET content = content || ?2 WHERE id = ?1")?
        .execute(params![message.0 as i64, delta])
}

pub(super) fn remove_message(conn: &Connection, message: MessageId) -> rusqlite::Result<usize> {
    conn.prepare_cached("DELETE FROM run WHERE message = ?1")?.execute([message.0 as i64])?;
    conn.prepare_cached("DELETE FROM message WHERE id = ?1")?.execute([message.0 as i64])
}

pub(super) fn put_draft(conn: &Connection, chat: ChatId, draft: &str) -> rusqlite::Result<usize> {
    conn.prepare_cached("UPDATE chat SET draft = ?2 WHERE id = ?1")?.execute(params![chat.0 as i64, draft])
}

pub(super) fn set_deleted(conn: &Connection, chat: ChatId, is_deleted: bool) -> rusqlite::Result<usize> {
    conn.prepare_cached("UPDATE chat SET deleted = ?2 WHERE id = ?1")?.execute(params![chat.0 as i64, is_deleted])
}

pub(super) fn put_setting(conn: &Connection, key: &str, value: &str) -> rusqlite::Result<usize> {
    conn.prepare_cached("INSERT OR REPLACE INTO setting(key, value) VALUES(?1, ?2)")?.execute(params![key, value])
}
