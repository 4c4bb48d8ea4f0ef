//! Commands on whole chats: open, name, delete, copy.

use crate::app::chat::{ChatId, Message, MessageId, RunSettings, numbered_title};
use crate::app::logic::AppCore;
use crate::app::state::{AppState, Deleted, FocusRequest, Workspace};
use crate::app::store::Write;
use crate::app::theme::NUM_HUES;
use std::collections::BTreeMap;

/// Opens an empty chat in the focused pane; one that nobody has used yet is taken again.
pub fn new_chat(core: &mut AppCore) {
    let state = &core.state;
    let unused = |id: &ChatId| state.chat(*id).is_some_and(AppState::is_blank);
    let blank = state.order.iter().copied().find(unused);
    let chat = blank.unwrap_or_else(|| core.new_chat(RunSettings::balanced()));
    open(core, chat);
}

/// Shows a chat in the focused pane, or focuses the pane that shows it already.
pub fn open(core: &mut AppCore, chat: ChatId) {
    if !core.state.chats.contains_key(&chat) {
        return;
    }
    load_messages(core, chat);
    give_hue(core, chat);
    let panes = &mut core.state.panes;
    match panes.chats.iter().position(|c| *c == chat) {
        Some(idx) => panes.focused = idx,
        None => {
            let focused = panes.focused;
            panes.chats[focused] = chat;
        }
    }
    core.state.workspace = Workspace::Chat;
    core.state.is_session_overlay_open = false;
    core.state.focus = Some(FocusRequest::Composer);
    super::panes::remember(core);
}

/// Opens the chat that stands `offset` places further down in the list, round its ends.
pub fn open_neighbour(core: &mut AppCore, offset: isize) {
    let order = &core.state.order;
    let Some(at) = order.iter().position(|c| *c == core.state.panes.focused_chat()) else { return };
    let next = order[(at as isize + offset).rem_euclid(order.len() as isize) as usize];
    open(core, next);
}

pub fn rename(core: &mut AppCore, chat: ChatId, title: &str) {
    let title = title.trim();
    let Some(target) = core.state.chats.get_mut(&chat).filter(|_| !title.is_empty()) else { return };
    target.title = title.to_owned();
    core.save_chat(chat);
}

/// Takes a chat out of the list. It can be brought back until another one is deleted or the app ends.
pub fn delete(core: &mut AppCore, chat: ChatId) {
    super::messages::stop(core, chat);
    let Some(removed) = core.state.chats.remove(&chat) else { return };
    core.state.order.retain(|c| *c != chat);
    core.state.context_full.remove(&chat);
    core.state.context_counts.remove(&chat);
    core.state.edit = core.state.edit.take().filter(|e| e.chat != chat);
    core.store.write(Write::Deleted { chat, is_deleted: true });
    core.state.owners.close(chat.0);
    core.hue_order.retain(|c| *c != chat);
    core.state.deleted = Some(Deleted { chat: Box::new(removed) });
    if let Some(idx) = core.state.panes.chats.iter().position(|c| *c == chat) {
        super::panes::forget_chat(core, idx);
    }
}

pub fn undo_delete(core: &mut AppCore) {
    let Some(deleted) = core.state.deleted.take() else { return };
    let chat = deleted.chat.id;
    core.state.chats.insert(chat, *deleted.chat);
    core.state.order.insert(0, chat);
    core.store.write(Write::Deleted { chat, is_deleted: false });
    open(core, chat);
}

/// Copies the path up to a message into a chat of its own.
pub fn branch(core: &mut AppCore, chat: ChatId, until: MessageId) {
    let Some(source) = core.state.chat(chat) else { return };
    let titles: Vec<&str> = core.state.chats.values().map(|c| c.title.as_str()).collect();
    let title = numbered_title(&source.title, &titles);
    let settings = source.settings.clone();
    let end = source.path().iter().position(|id| *id == until).map_or(0, |i| i + 1);
    let path: Vec<Message> =
        source.path()[..end].iter().filter_map(|id| source.message(*id)).filter(|m| !m.is_running()).cloned().collect();
    let copy = core.new_chat(settings);
    let mut new_of_old = BTreeMap::new();
    for mut message in path {
        let id = MessageId(core.next_id());
        new_of_old.insert(message.id, id);
        message.id = id;
        message.parent = message.parent.and_then(|p| new_of_old.get(&p).copied());
        core.add_message(copy, message);
    }
    core.state.branch_of.insert(copy, chat);
    rename(core, copy, &title);
    open(core, copy);
}

/// Reads the messages of a chat on its first opening.
pub fn load_messages(core: &mut AppCore, chat: ChatId) {
    let Some(target) = core.state.chats.get_mut(&chat).filter(|c| !c.is_loaded) else { return };
    match core.store.read_messages(chat) {
        Ok(messages) => {
            let cursor = target.cursor();
            target.restore_messages(messages, cursor);
        }
        Err(error) => {
            core.state.notice = Some(format!("“{}” cannot be read: {error}", target.title));
        }
    }
}

/// Gives a chat its hue. When all are taken, the chat opened longest ago that is neither shown nor running gives its up.
pub fn give_hue(core: &mut AppCore, chat: ChatId) {
    if core.hue_order.contains(&chat) {
        return;
    }
    if core.hue_order.len() >= NUM_HUES {
        let state = &core.state;
        let is_idle = |c: &ChatId| !state.panes.chats.contains(c) && state.run_of(*c).is_none();
        if let Some(idx) = core.hue_order.iter().position(is_idle)
            && let Some(old) = core.hue_order.remove(idx)
        {
            core.state.owners.close(old.0);
        }
    }
    core.state.owners.open(chat.0);
    core.hue_order.push_back(chat);
    super::panes::remember_hues(core);
}
