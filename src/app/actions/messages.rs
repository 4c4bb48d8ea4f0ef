//! Commands on messages and answers: send, stop, regenerate, edit, branch.

use crate::app::chat::{ChatId, Message, MessageId, Role, RunSettings};
use crate::app::command::Effect;
use crate::app::logic::AppCore;
use crate::app::state::{AppState, Edit, FocusRequest};
use crate::app::store::Write;

pub fn set_draft(core: &mut AppCore, chat: ChatId, text: String) {
    let Some(target) = core.state.chats.get_mut(&chat) else { return };
    if target.draft == text {
        return;
    }
    let is_on_disk = !AppState::is_blank(target);
    target.draft.clone_from(&text);
    // The first text of a chat creates its row; later drafts only change it.
    if is_on_disk {
        core.store.write(Write::Draft { chat, text });
    } else {
        core.save_chat(chat);
    }
}

/// Sends the draft of a chat; with "send to all panes" the same text goes to every pane that can take it.
pub fn send_draft(core: &mut AppCore, chat: ChatId) {
    let Some(draft) = core.state.chat(chat).map(|c| c.draft.trim().to_owned()) else { return };
    if draft.is_empty() || !core.state.can_send(chat) {
        return;
    }
    set_draft(core, chat, String::new());
    let panes = core.state.panes.clone();
    if panes.send_to_all && panes.chats.contains(&chat) {
        for other in panes.chats.into_iter().filter(|c| *c != chat) {
            send_text(core, other, &draft);
        }
    }
    send_text(core, chat, &draft);
}

/// Adds a user message at the end of the active path and begins its answer.
pub fn send_text(core: &mut AppCore, chat: ChatId, text: &str) {
    let text = text.trim();
    if text.is_empty() || !core.state.can_send(chat) {
        return;
    }
    super::chats::load_messages(core, chat);
    let id = MessageId(core.next_id());
    let parent = core.state.chat(chat).and_then(|c| c.cursor());
    add_user_message(core, chat, id, parent, text.to_owned());
    core.start_answer(chat);
}

fn add_user_message(core: &mut AppCore, chat: ChatId, id: MessageId, parent: Option<MessageId>, content: String) {
    let created_ms = core.state.clock.unix_ms;
    core.add_message(chat, Message { id, parent, role: Role::User, content, created_ms, run: None });
}

pub fn stop(core: &mut AppCore, chat: ChatId) {
    if let Some(message) = core.state.run_of(chat).map(|(id, _)| id) {
        core.stop_run(message);
    }
}

pub fn stop_all(core: &mut AppCore) {
    let messages: Vec<MessageId> = core.state.runs.keys().copied().collect();
    for message in messages {
        core.stop_run(message);
    }
}

/// Writes another answer beside `message`.
pub fn regenerate(core: &mut AppCore, chat: ChatId, message: MessageId) {
    if !core.state.can_send(chat) {
        return;
    }
    let Some(target) = core.state.chats.get_mut(&chat) else { return };
    let Some(parent) = target.message(message).filter(|m| m.role == Role::Assistant).and_then(|m| m.parent) else {
        return;
    };
    target.set_cursor(Some(parent));
    core.start_answer(chat);
}

pub fn regenerate_last(core: &mut AppCore) {
    let chat = core.state.panes.focused_chat();
    let last = core.state.chat(chat).and_then(AppState::last_answer).map(|m| m.id);
    if let Some(message) = last {
        regenerate(core, chat, message);
    }
}

pub fn copy_last_answer(core: &mut AppCore) {
    let text = core.state.focused_chat().and_then(AppState::last_answer).map(|m| m.content.clone());
    if let Some(text) = text {
        core.push_effect(Effect::Copy(text));
    }
}

pub fn start_edit(core: &mut AppCore, chat: ChatId, message: MessageId) {
    let text = core.state.chat(chat).and_then(|c| c.message(message)).map(|m| m.content.clone());
    if let Some(text) = text {
        core.state.edit = Some(Edit { chat, message, text });
    }
}

/// Edits the user's last message on the active path.
pub fn edit_last(core: &mut AppCore, chat: ChatId) {
    let last = core.state.chat(chat).and_then(|c| {
        c.path().iter().rev().filter_map(|id| c.message(*id)).find(|m| m.role == Role::User).map(|m| m.id)
    });
    if let Some(message) = last {
        start_edit(core, chat, message);
    }
}

pub fn set_edit_text(core: &mut AppCore, text: String) {
    if let Some(edit) = &mut core.state.edit {
        edit.text = text;
    }
}

/// Sends the edited text as a sibling of the message that was edited.
pub fn submit_edit(core: &mut AppCore) {
    let Some(edit) = core.state.edit.clone() else { return };
    if edit.text.trim().is_empty() || !core.state.can_send(edit.chat) {
        return;
    }
    core.state.edit = None;
    core.state.focus = Some(FocusRequest::Composer);
    let parent = core.state.chat(edit.chat).and_then(|c| c.message(edit.message)).and_then(|m| m.parent);
    let id = MessageId(core.next_id());
    add_user_message(core, edit.chat, id, parent, edit.text.trim().to_owned());
    core.start_answer(edit.chat);
}

pub fn select_sibling(core: &mut AppCore, chat: ChatId, message: MessageId, offset: isize) {
    if let Some(target) = core.state.chats.get_mut(&chat) {
        target.select_sibling(message, offset);
        core.save_chat(chat);
    }
}

pub fn set_settings(core: &mut AppCore, chat: ChatId, settings: RunSettings) {
    if let Some(target) = core.state.chats.get_mut(&chat) {
        target.settings = settings;
        core.save_chat(chat);
    }
}

/// Sends the turn that did not fit without the oldest turns. They stay visible.
pub fn drop_oldest(core: &mut AppCore, chat: ChatId) {
    if !core.state.can_send(chat) {
        return;
    }
    let Some(drop) = core.state.context_full.get(&chat).and_then(|f| f.drop) else { return };
    if let Some(target) = core.state.chats.get_mut(&chat) {
        target.context_start = Some(drop.first_kept);
    }
    core.start_answer(chat);
}

/// Takes the turn that did not fit back into the composer. A turn that has other answers stays and shows the newest.
pub fn cancel_turn(core: &mut AppCore, chat: ChatId) {
    let Some(full) = core.state.context_full.remove(&chat) else { return };
    match core.remove_message(chat, full.turn) {
        Some(message) => set_draft(core, chat, message.content),
        None => {
            let Some(target) = core.state.chats.get_mut(&chat) else { return };
            let newest = target.messages().iter().rev().find(|m| m.parent == Some(full.turn)).map(|m| m.id);
            target.set_cursor(newest.or(Some(full.turn)));
            core.save_chat(chat);
        }
    }
    core.state.focus = Some(FocusRequest::Composer);
}
