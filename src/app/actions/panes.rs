//! Commands on the window's layout: panes, workspaces, lists, theme.

use crate::app::chat::{ChatId, RunSettings};
use crate::app::logic::AppCore;
use crate::app::state::{AppState, FocusRequest, MAX_PANES, PaletteState, ThemeChoice, Workspace};
use crate::app::theme::OwnerHue;

const KEY_PANES: &str = "panes";
const KEY_LIST: &str = "session_list";
const KEY_DOCK: &str = "dock";
const KEY_THEME: &str = "theme";
const KEY_HUES: &str = "hues";

/// Puts the layout of the last start in place; without one, an empty chat.
pub fn restore(core: &mut AppCore) {
    let known: Vec<ChatId> = core
        .setting(KEY_PANES)
        .unwrap_or("")
        .split(',')
        .filter_map(|id| id.parse().ok().map(ChatId))
        .filter(|id| core.state.chats.contains_key(id))
        .take(MAX_PANES)
        .collect();
    core.state.panes.chats = known;
    core.state.panes.chats.dedup();
    if core.state.panes.chats.is_empty() {
        let first = core.new_chat(RunSettings::balanced());
        core.state.panes.chats.push(first);
    }
    restore_hues(core);
    for chat in core.state.panes.chats.clone() {
        super::chats::load_messages(core, chat);
        super::chats::give_hue(core, chat);
    }
    core.state.is_session_list_open = core.setting(KEY_LIST) != Some("closed");
    core.state.is_dock_open = core.setting(KEY_DOCK) != Some("closed");
    if let Some(theme) = core.setting(KEY_THEME).and_then(ThemeChoice::from_word) {
        core.state.theme = theme;
    }
    remember(core);
}

/// Chats keep their hues over starts.
fn restore_hues(core: &mut AppCore) {
    let kept = core.setting(KEY_HUES).unwrap_or("").to_owned();
    for (chat, hue) in kept.split(',').filter_map(|entry| entry.split_once(':')) {
        let (Ok(chat), Ok(hue)) = (chat.parse().map(ChatId), hue.parse()) else { continue };
        if core.state.chats.contains_key(&chat) && !core.hue_order.contains(&chat) {
            core.state.owners.reopen(chat.0, hue);
            core.hue_order.push_back(chat);
        }
    }
}

/// Keeps who has which hue for the next start.
pub fn remember_hues(core: &mut AppCore) {
    let hue = |chat: &ChatId| match core.state.owners.hue(chat.0) {
        OwnerHue::Chat(hue) => Some(format!("{}:{hue}", chat.0)),
        OwnerHue::Neutral(_) => None,
    };
    let kept: Vec<String> = core.hue_order.iter().filter_map(hue).collect();
    core.put_setting(KEY_HUES, kept.join(","));
}

/// Keeps which chats are side by side for the next start.
pub fn remember(core: &mut AppCore) {
    let ids: Vec<String> = core.state.panes.chats.iter().map(|c| c.0.to_string()).collect();
    core.put_setting(KEY_PANES, ids.join(","));
}

/// Adds a pane with an empty chat.
pub fn split(core: &mut AppCore) {
    let state = &core.state;
    let is_free = |id: &ChatId| state.chat(*id).is_some_and(AppState::is_blank) && !state.panes.chats.contains(id);
    let blank = state.order.iter().copied().find(is_free);
    if state.panes.chats.len() < MAX_PANES {
        let chat = blank.unwrap_or_else(|| core.new_chat(RunSettings::balanced()));
        open_in_split(core, chat);
    }
}

/// Adds a pane with this chat; beyond [`MAX_PANES`] it takes the focused pane's place.
pub fn open_in_split(core: &mut AppCore, chat: ChatId) {
    let panes = &mut core.state.panes;
    if panes.chats.len() < MAX_PANES && !panes.chats.contains(&chat) && core.state.chats.contains_key(&chat) {
        panes.chats.push(chat);
        panes.focused = panes.chats.len() - 1;
    }
    super::chats::open(core, chat);
}

/// Closes a pane. The chat and its run go on.
pub fn close(core: &mut AppCore, idx: usize) {
    let panes = &mut core.state.panes;
    if panes.chats.len() > 1 && idx < panes.chats.len() {
        panes.chats.remove(idx);
        if panes.focused >= idx {
            panes.focused = panes.focused.saturating_sub(1);
        }
        panes.send_to_all &= panes.chats.len() > 1;
        core.state.focus = Some(FocusRequest::Composer);
        remember(core);
    }
}

/// The chat of this pane is gone: closes the pane, or shows another chat in the last one.
pub fn forget_chat(core: &mut AppCore, idx: usize) {
    if core.state.panes.chats.len() > 1 {
        return close(core, idx);
    }
    let next = core.state.order.first().copied();
    let chat = next.unwrap_or_else(|| core.new_chat(RunSettings::balanced()));
    core.state.panes.chats[idx] = chat;
    super::chats::open(core, chat);
}

pub fn focus(core: &mut AppCore, idx: usize) {
    let panes = &mut core.state.panes;
    if idx < panes.chats.len() {
        panes.focused = idx;
    }
}

pub fn show_workspace(core: &mut AppCore, workspace: Workspace) {
    core.state.workspace = workspace;
    close_overlays(core);
    match workspace {
        Workspace::Chat => core.state.focus = Some(FocusRequest::Composer),
        Workspace::Models if !core.state.models.has_scanned => super::models::scan(core),
        Workspace::Models | Workspace::Inspect => {}
    }
}

pub fn toggle_session_list(core: &mut AppCore) {
    let state = &mut core.state;
    state.is_session_list_open = !state.is_session_list_open;
    state.is_session_overlay_open = !state.is_session_overlay_open;
    let word = if state.is_session_list_open { "open" } else { "closed" };
    core.put_setting(KEY_LIST, word.into());
}

pub fn toggle_dock(core: &mut AppCore) {
    let state = &mut core.state;
    state.is_dock_open = !state.is_dock_open;
    state.is_dock_overlay_open = !state.is_dock_overlay_open;
    let word = if state.is_dock_open { "open" } else { "closed" };
    core.put_setting(KEY_DOCK, word.into());
}

pub fn close_overlays(core: &mut AppCore) {
    core.state.is_session_overlay_open = false;
    core.state.is_dock_overlay_open = false;
}

pub fn open_palette(core: &mut AppCore) {
    core.state.palette = Some(PaletteState::default());
    core.state.focus = Some(FocusRequest::Palette);
}

pub fn close_palette(core: &mut AppCore) {
    core.state.palette = None;
    core.state.focus = Some(FocusRequest::Composer);
}

pub fn set_theme(core: &mut AppCore, theme: ThemeChoice) {
    core.state.theme = theme;
    core.put_setting(KEY_THEME, theme.word().into());
}
