//! The shell: keys, panes, palette, small windows.

use super::*;
use egui::{Event, Key, Modifiers};
use egui_kittest::kittest::Queryable;
use kvasir::app::state::{DockTab, EngineChoices, Workspace};

fn press(app: &mut App, modifiers: Modifiers, key: Key) {
    app.key_press_modifiers(modifiers, key);
    app.run_steps(3);
}

#[test]
fn keys_switch_workspaces_and_panels() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let ctrl = Modifiers::COMMAND;
    for (key, workspace) in
        [(Key::Num2, Workspace::Models), (Key::Num3, Workspace::Inspect), (Key::Num1, Workspace::Chat)]
    {
        press(&mut app, ctrl, key);
        assert_eq!(state(&app).workspace, workspace);
    }
    press(&mut app, ctrl, Key::B);
    assert!(!state(&app).is_session_list_open);
    press(&mut app, ctrl, Key::J);
    assert!(!state(&app).is_dock_open);
}

#[test]
fn panes_split_up_to_four_and_close_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    for num in [2, 3, 4, 4] {
        press(&mut app, Modifiers::COMMAND, Key::Backslash);
        assert_eq!(state(&app).panes.chats.len(), num);
    }
    let mut chats = state(&app).panes.chats.clone();
    chats.sort();
    chats.dedup();
    assert_eq!(chats.len(), 4, "no chat stands twice");
    for num in [3, 2, 1, 1] {
        press(&mut app, Modifiers::COMMAND, Key::W);
        assert_eq!(state(&app).panes.chats.len(), num);
    }
}

#[test]
fn policies_are_chosen_for_the_next_load_and_kept() {
    use kvasir::telemetry::{QueuePolicy, VictimPolicy};
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    send(&mut app, UiCommand::ShowWorkspace(Workspace::Models));
    app.run_steps(3);
    assert!(app.query_by_label("Load again").is_none(), "nothing was chosen");
    app.get_by_role_and_label(egui::accesskit::Role::ComboBox, "Queue").click();
    app.run_steps(3);
    app.get_by_label("First come, first served").click();
    app.run_steps(3);
    assert_eq!(state(&app).choices.queue, Some(QueuePolicy::Fcfs));
    assert_eq!(state(&app).choices.victim, None);
    app.get_by_label("Load again").click();
    wait_for(&mut app, "the load", |s| s.model().is_some() && s.loaded_with.scheduling_policy == QueuePolicy::Fcfs);
    app.run_steps(3);
    assert!(app.query_by_label("Load again").is_none(), "the choice is in force");
    let choices = EngineChoices { victim: Some(VictimPolicy::LeastComputed), ..state(&app).choices };
    send(&mut app, UiCommand::SetEngineChoices(choices));
    app.state_mut().core.shut_down();
    drop(app);
    assert_eq!(state(&app_in(dir.path())).choices, choices);
}

#[test]
fn what_is_typed_goes_to_all_panes_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    press(&mut app, Modifiers::COMMAND, Key::Backslash);
    app.get_by_label("Send to all panes").click();
    app.run_steps(3);
    assert!(state(&app).panes.send_to_all);
    let id = focused(&app);
    send(&mut app, UiCommand::SetDraft { chat: id, text: "Hello both".into() });
    send(&mut app, UiCommand::Send(id));
    wait_idle(&mut app);
    for id in state(&app).panes.chats.clone() {
        assert_eq!(texts(chat(&app, id))[0], ("user", "Hello both"));
        assert_eq!(chat(&app, id).path().len(), 2);
    }
}

#[test]
fn the_palette_finds_commands_and_chats() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let first = focused(&app);
    send(&mut app, UiCommand::SendText { chat: first, text: "About rivers".into() });
    wait_idle(&mut app);
    send(&mut app, UiCommand::NewChat);
    press(&mut app, Modifiers::COMMAND, Key::K);
    app.event(Event::Text("rivers".into()));
    app.run_steps(3);
    press(&mut app, Modifiers::NONE, Key::Enter);
    assert_eq!(focused(&app), first);
    assert!(state(&app).palette.is_none());
    press(&mut app, Modifiers::COMMAND, Key::K);
    app.event(Event::Text("theme light".into()));
    app.run_steps(3);
    press(&mut app, Modifiers::NONE, Key::Enter);
    assert_eq!(state(&app).theme, ThemeChoice::Light);
    press(&mut app, Modifiers::COMMAND, Key::K);
    press(&mut app, Modifiers::NONE, Key::Escape);
    assert!(state(&app).palette.is_none());
}

#[test]
fn a_narrow_window_shows_list_and_dock_over_the_chat() {
    let dir = tempfile::tempdir().unwrap();
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let mut app = harness(options(engine, dir.path()), [900.0, 560.0], DemoOutcome::default());
    assert!(app.query_by_label("New chat Ctrl+N").is_none(), "the list is hidden");
    press(&mut app, Modifiers::COMMAND, Key::B);
    assert!(app.query_by_label("New chat Ctrl+N").is_some());
    press(&mut app, Modifiers::NONE, Key::Escape);
    assert!(app.query_by_label("New chat Ctrl+N").is_none());
    assert!(app.query_by_label("Run settings").is_none(), "the dock is hidden");
    press(&mut app, Modifiers::COMMAND, Key::J);
    assert!(app.query_by_label("Run settings").is_some());
}

#[test]
fn run_settings_change_the_chat_in_focus_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let first = focused(&app);
    press(&mut app, Modifiers::COMMAND, Key::Backslash);
    let second = focused(&app);
    send(&mut app, UiCommand::SetDockTab(DockTab::RunSettings));
    app.run_steps(2);
    app.get_by_label("Fixed").click();
    app.run_steps(3);
    assert!(chat(&app, second).settings.seed.is_some());
    assert!(chat(&app, first).settings.seed.is_none());
}

#[test]
fn an_idle_window_asks_for_no_frame() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    // Without the caret, whose blinking is a timer of its own.
    app.drag_at(egui::pos2(700.0, 150.0));
    app.drop_at(egui::pos2(700.0, 150.0));
    app.remove_cursor();
    wait_for(&mut app, "the count", |s| !s.context_counts.is_empty());
    app.run_steps(30);
    let delay = app.output().viewport_output.values().map(|v| v.repaint_delay).min().unwrap();
    assert!(delay > Duration::from_secs(3600), "the next frame is due in {delay:?}");
}

#[test]
fn a_click_beside_the_buttons_of_a_composer_begins_to_write() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    app.run_steps(3);
    let field = kvasir::app::views::composer::field_id(chat(&app, focused(&app)));
    app.ctx.memory_mut(|m| m.surrender_focus(field));
    app.run_steps(2);
    assert!(!app.ctx.memory(|m| m.has_focus(field)), "nothing is written yet");
    app.get_by_label("Enter to send · Shift+Enter for a new line").click();
    app.run_steps(3);
    assert!(app.ctx.memory(|m| m.has_focus(field)));
}

#[test]
fn each_setting_of_the_engine_stands_beside_its_name() {
    use egui::accesskit::Role;
    for size in [[960.0, 600.0], [1440.0, 900.0]] {
        let dir = tempfile::tempdir().unwrap();
        let engine = EngineHandle::start_fake(FakeOptions::small());
        let mut app = harness(options(engine, dir.path()), size, DemoOutcome::default());
        send(&mut app, UiCommand::ShowWorkspace(Workspace::Models));
        app.run_steps(4);
        for name in ["Queue", "Keys and values", "When blocks are short, gives way", "and comes back by"] {
            let label = app.get_by_role_and_label(Role::Label, name).rect();
            let choice = app.get_by_role_and_label(Role::ComboBox, name).rect();
            let is_beside = (label.center().y - choice.center().y).abs() < 6.0 && label.right() <= choice.left();
            assert!(is_beside && choice.right() <= size[0], "{name} at {size:?}: {label:?}, {choice:?}");
        }
    }
}
