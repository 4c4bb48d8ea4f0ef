//! What each panel says in each of its states, as text.

use super::*;
use kvasir::app::state::{DockTab, Workspace};

fn check(name: &str, app: &App) {
    insta::with_settings!({ snapshot_path => "../../data/snapshots/app", prepend_module_to_snapshot => false, omit_expression => true }, {
        insta::assert_snapshot!(name, screen(app));
    });
}

/// The live dock has its own tests.
fn close_dock(app: &mut App) {
    send(app, UiCommand::ToggleDock);
    app.run_steps(2);
}

#[test]
fn first_run_without_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = harness(options(super::idle_engine(), dir.path()), [1440.0, 900.0], DemoOutcome::default());
    close_dock(&mut app);
    check("first_run", &app);
}

#[test]
fn empty_chat() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    close_dock(&mut app);
    wait_for(&mut app, "the count", |s| !s.context_counts.is_empty());
    app.run_steps(2);
    check("empty_chat", &app);
}

#[test]
fn finished_answer() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let id = focused(&app);
    let settings =
        kvasir::app::chat::RunSettings { temperature: 0.0, max_tokens: 12, ..chat(&app, id).settings.clone() };
    send(&mut app, UiCommand::SetSettings { chat: id, settings: Box::new(settings) });
    send(&mut app, UiCommand::SendText { chat: id, text: "What is **bold**?".into() });
    wait_idle(&mut app);
    send(&mut app, UiCommand::SetDockTab(DockTab::RunSettings));
    wait_for(&mut app, "the count", |s| s.context_counts.get(&id).is_some_and(|c| c.tokens > 80));
    app.run_steps(2);
    check("finished_answer", &app);
}

#[test]
fn models_without_any() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    close_dock(&mut app);
    send(&mut app, UiCommand::ShowWorkspace(Workspace::Models));
    wait_for(&mut app, "the scan", |s| s.models.has_scanned);
    app.run_steps(2);
    check("models_empty", &app);
}

#[test]
fn palette_without_a_query() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    wait_for(&mut app, "the count", |s| !s.context_counts.is_empty());
    close_dock(&mut app);
    send(&mut app, UiCommand::OpenPalette);
    app.run_steps(3);
    check("palette", &app);
}

#[test]
fn chats_of_a_newer_version_are_shown_and_said_to_be_read_only() {
    let dir = tempfile::tempdir().unwrap();
    {
        let mut app = app_in(dir.path());
        let id = focused(&app);
        send(&mut app, UiCommand::SendText { chat: id, text: "Old times".into() });
        wait_idle(&mut app);
        app.state_mut().core.shut_down();
    }
    let path = dir.path().join(kvasir::app::store::FILE_NAME);
    rusqlite::Connection::open(path).unwrap().pragma_update(None, "user_version", 99).unwrap();
    let app = app_in(dir.path());
    let text = screen(&app);
    assert!(text.contains("Chats are read-only"), "{text}");
    assert!(text.contains("Chat Old times"), "{text}");
}
