//! The store on real files: reopening, crashes, upgrades.

use super::*;
use crate::app::chat::{Role, RunSettings, RunStatus};

fn chat_with_answer(id: u64) -> (Chat, Message) {
    let mut chat = Chat::new(ChatId(id), 1000, RunSettings::balanced());
    chat.add(Message {
        id: MessageId(id + 1),
        parent: None,
        role: Role::User,
        content: "Question".into(),
        created_ms: 1001,
        run: None,
    });
    let answer = Message {
        id: MessageId(id + 2),
        parent: Some(MessageId(id + 1)),
        role: Role::Assistant,
        content: String::new(),
        created_ms: 1002,
        run: Some(RunRecord::started("tiny".into())),
    };
    chat.add(answer.clone());
    (chat, answer)
}

fn write_all(store: &Store, chat: &Chat) {
    store.write(Write::Chat(ChatRow::of(chat)));
    for message in chat.messages() {
        store.write(Write::Message { chat: chat.id, message: Box::new(message.clone()) });
    }
}

#[test]
fn chats_survive_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let (mut chat, answer) = chat_with_answer(10);
    chat.draft = "half a thought".into();
    chat.settings.seed = Some(u64::MAX);
    chat.context_start = Some(MessageId(11));
    {
        let (store, library) = Store::open(dir.path());
        assert!(library.chats.is_empty());
        assert_eq!(store.health(), StoreHealth::Writing);
        write_all(&store, &chat);
        store.write(Write::AppendText { message: answer.id, delta: "Hel".into() });
        store.write(Write::AppendText { message: answer.id, delta: "lo".into() });
        let mut run = answer.run.clone().unwrap();
        run.status = RunStatus::Done;
        run.output_tokens = 2;
        store.write(Write::Run { message: answer.id, run: Box::new(run) });
        store.write(Write::Setting { key: "theme".into(), value: "dark".into() });
    }
    let (store, library) = Store::open(dir.path());
    assert_eq!(library.settings["theme"], "dark");
    assert_eq!(library.last_id, 12);
    let mut restored = library.chats.into_iter().next().unwrap();
    let cursor = restored.cursor();
    restored.restore_messages(store.read_messages(chat.id).unwrap(), cursor);
    let text = restored.message_mut(answer.id).unwrap();
    assert_eq!((text.content.as_str(), text.run.as_ref().unwrap().status), ("Hello", RunStatus::Done));
    text.content.clear();
    text.run = answer.run;
    assert_eq!(restored, chat);
}

#[test]
fn an_answer_that_was_being_written_is_marked_interrupted_and_keeps_its_text() {
    let dir = tempfile::tempdir().unwrap();
    let (chat, answer) = chat_with_answer(10);
    let (store, _) = Store::open(dir.path());
    write_all(&store, &chat);
    store.flush();
    store.write(Write::AppendText { message: answer.id, delta: "so far".into() });
    std::thread::sleep(WRITE_EVERY + Duration::from_millis(500));
    // As after a kill: the files as they are now, without the writer's goodbye.
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let (reopened, library) = Store::open(copy.path());
    assert_eq!(library.chats.len(), 1);
    let messages = reopened.read_messages(chat.id).unwrap();
    assert_eq!(messages[1].content, "so far");
    assert_eq!(messages[1].run.as_ref().unwrap().status, RunStatus::Interrupted);
}

#[test]
fn a_file_of_a_newer_version_is_read_but_never_written() {
    let dir = tempfile::tempdir().unwrap();
    let (chat, _) = chat_with_answer(10);
    {
        let (store, _) = Store::open(dir.path());
        write_all(&store, &chat);
    }
    let path = dir.path().join(FILE_NAME);
    Connection::open(&path).unwrap().pragma_update(None, "user_version", 99).unwrap();
    let before = std::fs::read(&path).unwrap();
    let (store, library) = Store::open(dir.path());
    assert!(matches!(store.health(), StoreHealth::ReadOnly { reason } if reason.contains("99")));
    assert_eq!(library.chats.len(), 1);
    store.write(Write::Deleted { chat: chat.id, is_deleted: true });
    store.flush();
    drop(store);
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn a_damaged_file_is_left_alone_and_the_app_still_starts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE_NAME);
    std::fs::write(&path, vec![7u8; 5000]).unwrap();
    let (store, library) = Store::open(dir.path());
    assert!(matches!(store.health(), StoreHealth::MemoryOnly { .. }));
    assert!(library.chats.is_empty());
    drop(store);
    assert_eq!(std::fs::read(&path).unwrap(), vec![7u8; 5000]);
}

#[test]
fn a_migration_backs_the_file_up_first_and_keeps_three() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE_NAME);
    let mut conn = Connection::open(&path).unwrap();
    sql::migrate(&mut conn, &path, sql::MIGRATIONS).unwrap();
    let mut steps = sql::MIGRATIONS.to_vec();
    for n in 0..5 {
        steps.push("CREATE TABLE IF NOT EXISTS extra(x)");
        sql::migrate(&mut conn, &path, &steps).unwrap();
        assert_eq!(sql::user_version(&conn).unwrap(), sql::MIGRATIONS.len() + n + 1);
    }
    let backups = std::fs::read_dir(dir.path())
        .unwrap()
        .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().ends_with(".bak"));
    assert_eq!(backups.count(), 3);
}

#[test]
fn deleting_can_be_undone_until_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let (kept, _) = chat_with_answer(10);
    let (gone, _) = chat_with_answer(20);
    {
        let (store, _) = Store::open(dir.path());
        write_all(&store, &kept);
        write_all(&store, &gone);
        store.write(Write::Deleted { chat: kept.id, is_deleted: true });
        store.write(Write::Deleted { chat: kept.id, is_deleted: false });
        store.write(Write::Deleted { chat: gone.id, is_deleted: true });
    }
    let (store, library) = Store::open(dir.path());
    assert_eq!(library.chats.iter().map(|c| c.id).collect::<Vec<_>>(), [kept.id]);
    assert!(store.read_messages(gone.id).unwrap().is_empty());
}

#[test]
fn streamed_text_is_merged_and_order_is_kept() {
    let (_, answer) = chat_with_answer(1);
    let mut writes = Vec::new();
    let append = |text: &str| Write::AppendText { message: answer.id, delta: text.into() };
    push_merged(&mut writes, append("a"));
    push_merged(&mut writes, append("b"));
    push_merged(&mut writes, Write::AppendText { message: MessageId(77), delta: "x".into() });
    push_merged(&mut writes, append("c"));
    assert_eq!(writes, [append("abc"), Write::AppendText { message: MessageId(77), delta: "x".into() }]);
    push_merged(&mut writes, Write::RemoveMessage(answer.id));
    push_merged(&mut writes, append("d"));
    assert_eq!(writes.len(), 4, "text after a removal is not folded into text before it");
}
