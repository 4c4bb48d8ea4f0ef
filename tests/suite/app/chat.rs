//! Chatting: composer, input method, runs, branches, scrolling, the store.

use super::*;
use egui::{Event, ImeEvent, Key, Modifiers};
use egui_kittest::kittest::Queryable;
use kvasir::app::chat::{MessageId, Role, RunSettings, RunStatus};
use kvasir::app::state::Phase;
use kvasir::app::store::{ChatRow, Store, Write};

fn greedy(max_tokens: u32) -> RunSettings {
    RunSettings { temperature: 0.0, max_tokens, ..RunSettings::balanced() }
}

fn ask(app: &mut App, text: &str, max_tokens: u32) -> ChatId {
    let id = focused(app);
    send(app, UiCommand::SetSettings { chat: id, settings: Box::new(greedy(max_tokens)) });
    send(app, UiCommand::SendText { chat: id, text: text.into() });
    id
}

fn type_text(app: &mut App, text: &str) {
    app.event(Event::Text(text.into()));
    app.step();
}

#[test]
fn typing_and_enter_sends_and_the_answer_streams_in() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    type_text(&mut app, "Hello there");
    assert_eq!(chat(&app, focused(&app)).draft, "Hello there");
    app.key_press(Key::Enter);
    app.step();
    app.step();
    wait_idle(&mut app);
    let chat = chat(&app, focused(&app));
    let messages: Vec<&Message> = path(chat).collect();
    assert_eq!((messages.len(), messages[0].content.as_str()), (2, "Hello there"));
    assert!(!messages[1].content.is_empty());
    let run = messages[1].run.as_ref().unwrap();
    assert_eq!(run.status, RunStatus::Done);
    assert!(run.output_tokens > 0 && run.prompt_tokens > 0 && run.last_step >= run.first_step);
    assert_eq!((chat.draft.as_str(), chat.title.as_str()), ("", "Hello there"));
}

#[test]
fn enter_while_an_input_method_composes_sends_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let ime = |event| Event::Ime(event);
    app.event(ime(ImeEvent::Preedit { text: "nihon".into(), active_range_chars: None }));
    app.step();
    app.key_press(Key::Enter);
    app.run_steps(3);
    let id = focused(&app);
    assert!(chat(&app, id).path().is_empty(), "nothing was sent");
    app.event(ime(ImeEvent::Commit("Nippon".into())));
    app.step();
    app.key_press(Key::Enter);
    app.step();
    assert!(chat(&app, id).path().is_empty(), "the Enter that ends a composition sends nothing");
    assert_eq!(chat(&app, id).draft, "Nippon", "the text is kept, without a line break");
    app.run_steps(2);
    app.key_press(Key::Enter);
    app.run_steps(3);
    assert_eq!(path(chat(&app, id)).filter(|m| m.role == Role::User).count(), 1, "sent once");
}

#[test]
fn shift_enter_makes_a_new_line() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    type_text(&mut app, "a");
    app.key_press_modifiers(Modifiers::SHIFT, Key::Enter);
    app.run_steps(2);
    type_text(&mut app, "b");
    app.step();
    assert_eq!(chat(&app, focused(&app)).draft, "a\nb");
}

#[test]
fn four_chats_at_once_get_the_texts_they_get_alone() {
    let questions = ["one", "two and more", "three is a longer question than the others", "four"];
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_with(dir.path(), FakeOptions { max_num_batched_tokens: 32, ..slow(1) });
    let mut ids = vec![focused(&app)];
    for _ in 1..4 {
        send(&mut app, UiCommand::Split);
        ids.push(focused(&app));
    }
    for (id, question) in ids.iter().zip(questions) {
        send(&mut app, UiCommand::SetSettings { chat: *id, settings: Box::new(greedy(40)) });
        send(&mut app, UiCommand::SendText { chat: *id, text: question.into() });
    }
    let mut most = 0;
    wait_for(&mut app, "all answers", |s| {
        most = most.max(s.runs.values().filter(|r| r.phase == Phase::Writing).count());
        s.runs.is_empty()
    });
    assert!(most >= 2, "at least two wrote at the same time");
    for (id, question) in ids.iter().zip(questions) {
        let alone_dir = tempfile::tempdir().unwrap();
        let mut alone = app_in(alone_dir.path());
        let alone_id = ask(&mut alone, question, 40);
        wait_idle(&mut alone);
        assert_eq!(texts(chat(&app, *id)), texts(chat(&alone, alone_id)));
    }
}

#[test]
fn a_run_goes_on_while_another_chat_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_with(dir.path(), slow(2));
    let id = ask(&mut app, "long one", 60);
    send(&mut app, UiCommand::NewChat);
    assert_ne!(focused(&app), id);
    wait_idle(&mut app);
    let run = path(chat(&app, id)).last().unwrap().run.clone().unwrap();
    assert_eq!(run.status, RunStatus::Done);
}

#[test]
fn stop_keeps_the_text_so_far() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_with(dir.path(), slow(5));
    let id = ask(&mut app, "go on and on", 500);
    wait_for(&mut app, "some text", |s| path(s.chat(id).unwrap()).last().is_some_and(|m| m.content.len() > 5));
    app.key_press(Key::Escape);
    app.run_steps(2);
    wait_idle(&mut app);
    let last = path(chat(&app, id)).last().unwrap();
    let run = last.run.as_ref().unwrap();
    assert_eq!((run.status, run.stop_reason.as_str()), (RunStatus::Stopped, "stopped"));
    assert!(last.content.len() > 5);
}

#[test]
fn regenerate_and_edit_make_branches_that_can_be_switched() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let id = ask(&mut app, "first", 20);
    wait_idle(&mut app);
    let first_answer = path(chat(&app, id)).last().unwrap().id;
    app.get_by_label("Regenerate").click();
    app.run_steps(3);
    wait_idle(&mut app);
    assert_eq!(chat(&app, id).siblings(first_answer).len(), 2);
    let requests = state(&app).snapshot.requests.clone();
    let second = requests.iter().find(|r| r.parent.is_some()).expect("the second answer is a fork of the first");
    let first = requests.iter().find(|r| Some(r.id) == second.parent).expect("its parent is known");
    assert_eq!((first.parent, first.prompt_tokens), (None, second.prompt_tokens));
    app.get_by_label("Previous version").click();
    app.run_steps(3);
    assert_eq!(path(chat(&app, id)).last().unwrap().id, first_answer);
    let question = path(chat(&app, id)).next().unwrap().id;
    send(&mut app, UiCommand::StartEdit { chat: id, message: question });
    send(&mut app, UiCommand::SetEditText("second".into()));
    app.get_by_label("Send as new branch").click();
    app.run_steps(3);
    wait_idle(&mut app);
    assert_eq!(texts(chat(&app, id))[0], ("user", "second"));
    assert_eq!(chat(&app, id).messages().len(), 5, "nothing was removed");
}

#[test]
fn branching_copies_the_path_into_a_numbered_chat() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let id = ask(&mut app, "Poem", 20);
    wait_idle(&mut app);
    let last = path(chat(&app, id)).last().unwrap().id;
    send(&mut app, UiCommand::BranchAsChat { chat: id, message: last });
    let copy = focused(&app);
    assert_ne!(copy, id);
    assert_eq!(chat(&app, copy).title, "Poem (2)");
    assert_eq!(texts(chat(&app, copy)), texts(chat(&app, id)));
    ask(&mut app, "Another", 20);
    wait_idle(&mut app);
    let requests = state(&app).snapshot.requests.clone();
    let branch = requests.iter().find(|r| r.owner.id == copy.0).expect("it was asked");
    assert_eq!(
        branch.parent,
        requests.iter().find(|r| r.owner.id == id.0).map(|r| r.id),
        "a fork of the chat's answer"
    );
}

#[test]
fn the_next_turn_and_what_a_failed_answer_began_are_no_forks() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    ask(&mut app, "first", 20);
    wait_idle(&mut app);
    ask(&mut app, "second", 20);
    wait_idle(&mut app);
    assert!(state(&app).snapshot.requests.iter().all(|r| r.parent.is_none()));
}

#[test]
fn a_turn_that_does_not_fit_is_not_sent_until_the_user_decides() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_with(dir.path(), FakeOptions { max_model_len: 512, ..FakeOptions::small() });
    let id = ask(&mut app, &"many words ".repeat(15), 20);
    wait_idle(&mut app);
    ask(&mut app, &"many words ".repeat(25), 20);
    wait_for(&mut app, "the banner", |s| s.context_full.contains_key(&id));
    app.run_steps(2);
    let full = state(&app).context_full[&id];
    assert!(full.needed > full.limit && full.limit == 512);
    assert_eq!(chat(&app, id).path().len(), 3, "the question stays, no answer was begun");
    app.get_by_label("Drop 1 oldest turn").click();
    app.run_steps(3);
    wait_idle(&mut app);
    let chat = chat(&app, id);
    assert_eq!(chat.path().len(), 4, "the dropped turn is still shown");
    assert!(chat.is_dropped(chat.path()[0]) && !chat.is_dropped(chat.path()[2]));
    let run = path(chat).last().unwrap().run.clone().unwrap();
    assert_eq!(run.status, RunStatus::Done);
    assert!(run.prompt_tokens + 20 <= 512);
}

#[test]
fn cancelling_a_turn_that_does_not_fit_gives_the_text_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_with(dir.path(), FakeOptions { max_model_len: 256, ..FakeOptions::small() });
    let text = "far too long ".repeat(40);
    let id = ask(&mut app, &text, 20);
    wait_for(&mut app, "the banner", |s| s.context_full.contains_key(&id));
    assert_eq!(state(&app).context_full[&id].drop, None, "there is nothing to drop");
    app.run_steps(2);
    app.get_by_label("Cancel").click();
    app.run_steps(3);
    assert!(chat(&app, id).path().is_empty());
    assert_eq!(chat(&app, id).draft, text.trim());
}

#[test]
fn tokens_counted_are_the_tokens_sent() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let id = focused(&app);
    send(&mut app, UiCommand::SetDraft { chat: id, text: "How many tokens is this?".into() });
    let empty = state(&app).context_counts.get(&id).map_or(0, |c| c.tokens);
    wait_for(&mut app, "a count", |s| s.context_counts.get(&id).is_some_and(|c| c.tokens > empty));
    app.run_steps(5);
    wait_for(&mut app, "the count of the draft", |s| s.context_counts[&id].tokens > 60);
    let counted = state(&app).context_counts[&id].tokens;
    send(&mut app, UiCommand::Send(id));
    wait_idle(&mut app);
    assert_eq!(path(chat(&app, id)).last().unwrap().run.as_ref().unwrap().prompt_tokens, counted);
}

#[test]
fn everything_is_there_again_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (id, before) = {
        let mut app = app_in(dir.path());
        let id = ask(&mut app, "Remember me", 20);
        wait_idle(&mut app);
        send(&mut app, UiCommand::SetDraft { chat: id, text: "half a thought".into() });
        let before = chat(&app, id).clone();
        app.state_mut().core.shut_down();
        (id, before)
    };
    let app = app_in(dir.path());
    assert_eq!(focused(&app), id, "the pane shows the same chat");
    assert_eq!(chat(&app, id), &before);
}

#[test]
fn chats_keep_their_hues_over_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let first = ask(&mut app, "One", 4);
    wait_idle(&mut app);
    send(&mut app, UiCommand::NewChat);
    let second = ask(&mut app, "Two", 4);
    wait_idle(&mut app);
    let hues = |app: &App| [first, second].map(|id| state(app).owners.hue(id.0));
    let before = hues(&app);
    assert_ne!(before[0], before[1]);
    app.state_mut().core.shut_down();
    drop(app);
    // Only the second chat is shown again, so that it alone would be first in line for a hue.
    let mut app = app_in(dir.path());
    assert_eq!(focused(&app), second);
    assert_eq!(state(&app).owners.hue(second.0), before[1]);
    send(&mut app, UiCommand::OpenChat(first));
    app.run_steps(2);
    assert_eq!(hues(&app), before);
}

#[test]
fn a_copied_chat_and_another_version_say_what_they_share() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let long = "Tell me about the sea, the wind, the boats and the people who live by them. ".repeat(6);
    let id = ask(&mut app, &long, 40);
    wait_idle(&mut app);
    let answer = *chat(&app, id).path().last().unwrap();
    assert!(!screen(&app).contains("with version"), "the first version shares with nobody");
    send(&mut app, UiCommand::Regenerate { chat: id, message: answer });
    wait_idle(&mut app);
    let text = screen(&app);
    assert!(text.contains("tokens with version 1"), "{text}");
    let second = *chat(&app, id).path().last().unwrap();
    send(&mut app, UiCommand::BranchAsChat { chat: id, message: second });
    let copy = focused(&app);
    assert_ne!(copy, id);
    send(&mut app, UiCommand::SendText { chat: copy, text: "And then?".into() });
    wait_idle(&mut app);
    let text = screen(&app);
    assert!(text.contains(&format!("tokens with “{}”", chat(&app, id).title)), "{text}");
}

#[test]
fn a_system_prompt_is_pinned_from_the_chats_menu_and_let_go_in_inspect() {
    use kvasir::app::inspect::PrefixCommand;
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let id = focused(&app);
    let system_prompt = "You are a careful guide to boats, rivers and weather. ".repeat(3);
    let settings = RunSettings { system_prompt, ..greedy(4) };
    send(&mut app, UiCommand::SetSettings { chat: id, settings: Box::new(settings) });
    send(&mut app, UiCommand::PinSystemPrompt(id));
    wait_for(&mut app, "the pin", |s| s.snapshot.prefixes.iter().any(|p| p.pinned));
    let prefix = state(&app).snapshot.prefixes[0].clone();
    assert!(prefix.blocks >= 9, "the whole prompt is kept: {prefix:?}");
    send(&mut app, UiCommand::SendText { chat: id, text: "Hello".into() });
    wait_idle(&mut app);
    let run = path(chat(&app, id)).last().unwrap().run.clone().unwrap();
    assert!(run.cached_tokens >= prefix.tokens, "{run:?}");
    send(&mut app, UiCommand::Prefix(PrefixCommand::Pin { id: prefix.id, name: "Boats".into() }));
    wait_for(&mut app, "the name", |s| s.snapshot.prefixes[0].name.as_deref() == Some("Boats"));
    send(&mut app, UiCommand::Prefix(PrefixCommand::Unpin { id: prefix.id }));
    wait_for(&mut app, "the end of the pin", |s| s.snapshot.kv.pinned == 0);
    send(&mut app, UiCommand::Prefix(PrefixCommand::Reset));
    wait_for(&mut app, "an empty cache", |s| s.snapshot.kv.cached_idle == 0);
    assert_eq!(state(&app).notice, None);
}

#[test]
fn a_killed_process_loses_at_most_a_second_of_four_streams() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_with(dir.path(), slow(10));
    send(&mut app, UiCommand::RunDemo);
    wait_for(&mut app, "text in all four", |s| s.runs.len() == 4 && s.runs.keys().all(|id| text_of(s, *id).len() > 20));
    let seen: Vec<(MessageId, String)> =
        state(&app).runs.keys().map(|id| (*id, text_of(state(&app), *id).to_owned())).collect();
    std::thread::sleep(Duration::from_millis(1000));
    // What a killed process leaves behind: the files as they are.
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let restarted = app_in(copy.path());
    assert_eq!(state(&restarted).chats.len(), 4, "all four conversations");
    for (id, text) in seen {
        let kept = text_of(state(&restarted), id);
        assert!(kept.starts_with(&text), "kept {kept:?} of {text:?}");
    }
    assert!(screen(&restarted).contains("Interrupted: the app ended while this was being written"));
}

fn text_of(state: &AppState, id: MessageId) -> &str {
    state.chats.values().find_map(|c| c.message(id)).map_or("", |m| m.content.as_str())
}

#[test]
fn deleting_a_chat_can_be_undone() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_in(dir.path());
    let id = ask(&mut app, "Delete me", 10);
    wait_idle(&mut app);
    send(&mut app, UiCommand::DeleteChat(id));
    app.step();
    assert!(state(&app).chat(id).is_none());
    app.get_by_label("Undo").click();
    app.run_steps(3);
    assert_eq!(chat(&app, id).path().len(), 2);
    assert_eq!(focused(&app), id);
}

#[test]
fn scrolling_up_lets_go_of_the_end_and_holds_what_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut app = app_with(dir.path(), slow(4));
    let id = ask(&mut app, &"A line of the question.\n\n".repeat(20), 40);
    wait_idle(&mut app);
    send(&mut app, UiCommand::SendText { chat: id, text: "And another answer, please.\n\n".repeat(6) });
    send(&mut app, UiCommand::SetSettings { chat: id, settings: Box::new(greedy(200)) });
    app.run_steps(4);
    let view = |app: &App| (app.state().chat_view.is_following(id), app.state().chat_view.scroll(id).unwrap());
    assert!(view(&app).0 && view(&app).1.0 > 100.0, "a long transcript shows its end: {:?}", view(&app));
    app.hover_at(egui::pos2(700.0, 400.0));
    app.event(Event::MouseWheel {
        unit: egui::MouseWheelUnit::Point,
        delta: egui::vec2(0.0, 60.0),
        phase: egui::TouchPhase::Move,
        source: egui::MouseWheelSource::Wheel,
        modifiers: Modifiers::NONE,
    });
    app.run_steps(30);
    let (is_following, (offset, _)) = view(&app);
    assert!(!is_following, "any upward input lets go");
    for _ in 0..60 {
        std::thread::sleep(Duration::from_millis(4));
        app.step();
    }
    assert_eq!(view(&app).1.0, offset, "streaming text does not move what is read");
    app.key_press(Key::PageDown);
    app.run_steps(3);
    app.key_press(Key::PageDown);
    app.run_steps(3);
    assert!(view(&app).0, "reaching the end takes hold again: {:?}", view(&app));
    wait_idle(&mut app);
    app.run_steps(3);
    assert!(view(&app).1.1 <= 1.0, "the end is in view: {:?}", view(&app));
}

#[test]
fn a_long_transcript_costs_no_more_than_a_short_one() {
    let dir = tempfile::tempdir().unwrap();
    let id = ChatId(1);
    {
        let mut long = Chat::new(id, 0, RunSettings::balanced());
        for n in 0..400u64 {
            long.add(Message {
                id: MessageId(n + 2),
                parent: n.checked_sub(1).map(|p| MessageId(p + 2)),
                role: Role::User,
                content: format!("Message {n}: {}", "some words of a long conversation ".repeat(16)),
                created_ms: 0,
                run: None,
            });
        }
        let (store, _) = Store::open(dir.path());
        store.write(Write::Chat(ChatRow::of(&long)));
        for message in long.messages() {
            store.write(Write::Message { chat: id, message: Box::new(message.clone()) });
        }
    }
    let mut app = app_in(dir.path());
    send(&mut app, UiCommand::OpenChat(id));
    app.run_steps(60);
    let p95 = app.state().frames.p95_us().unwrap();
    let (offset, distance) = app.state().chat_view.scroll(id).unwrap();
    assert!(offset > 20_000.0 && distance <= 1.0, "the end of a long transcript is shown: {offset} {distance}");
    assert!(p95 < 8_000, "building a frame took {p95} us");
}
