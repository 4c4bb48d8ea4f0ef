//! The command palette: chats and actions by name.

use super::{ViewCtx, owner_dot, right_to_left, small};
use crate::app::chat::ChatId;
use crate::app::command::UiCommand;
use crate::app::shortcuts::actions;
use crate::app::state::{AppState, FocusRequest, PaletteState};
use crate::app::theme::{radius, space};
use egui::{
    Align, Align2, Area, Frame, Id, Key, Label, Layout, Margin, Order, RichText, ScrollArea, Sense, TextEdit, Ui, vec2,
};

const WIDTH: f32 = 520.0;
const ROW_HEIGHT: f32 = 30.0;
const MAX_CHATS: usize = 30;

/// A line of the palette.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub name: String,
    pub key: String,
    /// Set for a chat.
    pub chat: Option<ChatId>,
    pub command: UiCommand,
}

/// What matches the query: actions in their order, then chats by last use.
pub fn entries(state: &AppState, query: &str, format_key: &dyn Fn(&egui::KeyboardShortcut) -> String) -> Vec<Entry> {
    let commands = actions().into_iter().filter(|a| matches(a.name, query)).map(|a| Entry {
        name: a.name.into(),
        key: a.key.as_ref().map(format_key).unwrap_or_default(),
        chat: None,
        command: a.command,
    });
    let chats =
        state.order.iter().filter_map(|id| state.chat(*id)).filter(|c| matches(&c.title, query)).take(MAX_CHATS);
    let chats = chats.map(|c| Entry {
        name: c.title.clone(),
        key: String::new(),
        chat: Some(c.id),
        command: UiCommand::OpenChat(c.id),
    });
    // Without a query, chats stand first: that is what one looks for most.
    if query.trim().is_empty() { chats.take(6).chain(commands).collect() } else { commands.chain(chats).collect() }
}

/// Every word of the query begins a word of the name or stands inside it.
fn matches(name: &str, query: &str) -> bool {
    let name = name.to_lowercase();
    query.to_lowercase().split_whitespace().all(|word| name.contains(word))
}

pub fn palette_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let Some(palette) = cx.state.palette.clone() else { return };
    let ctx = ui.ctx().clone();
    let list = entries(cx.state, &palette.query, &|key| ctx.format_shortcut(key).replace("Backslash", "\\"));
    take_keys(cx, &ctx, &palette, &list);
    let width = WIDTH.min(ctx.content_rect().width() - 2.0 * space::XL);
    Area::new(Id::unique("palette"))
        .order(Order::Foreground)
        .anchor(Align2::CENTER_TOP, vec2(0.0, 56.0))
        .accessible_name("Command palette")
        .show(&ctx, |ui| {
            Frame::window(ui.style()).inner_margin(Margin::same(space::S as i8)).show(ui, |ui| {
                ui.set_width(width);
                field_ui(cx, ui, &palette);
                ui.add_space(space::XS);
                list_ui(cx, ui, &palette, &list);
            });
        });
    let pressed_outside = ctx.input(|i| i.pointer.any_pressed())
        && ctx
            .memory(|m| m.area_rect(Id::unique("palette")))
            .is_some_and(|rect| ctx.input(|i| i.pointer.interact_pos()).is_some_and(|at| !rect.contains(at)));
    if pressed_outside {
        cx.send(UiCommand::ClosePalette);
    }
}

fn take_keys(cx: &mut ViewCtx<'_>, ctx: &egui::Context, palette: &PaletteState, list: &[Entry]) {
    let pressed = |key: Key| ctx.input_mut(|i| i.consume_key(egui::Modifiers::NONE, key));
    let (up, down, enter, escape) =
        (pressed(Key::ArrowUp), pressed(Key::ArrowDown), pressed(Key::Enter), pressed(Key::Escape));
    if escape {
        cx.send(UiCommand::ClosePalette);
    } else if enter {
        if let Some(entry) = list.get(palette.selected) {
            cx.send(UiCommand::ClosePalette);
            cx.send(entry.command.clone());
        }
    } else if up || down {
        let last = list.len().saturating_sub(1);
        let selected = if up { palette.selected.saturating_sub(1) } else { (palette.selected + 1).min(last) };
        cx.send(UiCommand::SetPalette { query: palette.query.clone(), selected });
    }
}

fn field_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, palette: &PaletteState) {
    let mut query = palette.query.clone();
    let field = TextEdit::singleline(&mut query)
        .id(Id::unique("palette_query"))
        .hint_text("Search chats and commands")
        .margin(Margin::symmetric(space::S as i8, 6))
        .desired_width(f32::INFINITY);
    let response = ui.add(field);
    if response.changed() {
        cx.send(UiCommand::SetPalette { query, selected: 0 });
    }
    if cx.state.focus == Some(FocusRequest::Palette) || !response.has_focus() {
        response.request_focus();
    }
}

fn list_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, palette: &PaletteState, list: &[Entry]) {
    if list.is_empty() {
        ui.label(small("Nothing has this name", cx.theme.text_weak));
        return;
    }
    ui.spacing_mut().item_spacing.y = 0.0;
    let scroll = ScrollArea::vertical().id_salt("palette_list").max_height(360.0);
    scroll.show(ui, |ui| {
        for (idx, entry) in list.iter().enumerate() {
            row_ui(cx, ui, entry, idx == palette.selected);
        }
    });
}

fn row_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, entry: &Entry, is_selected: bool) {
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), ROW_HEIGHT), Sense::click());
    response.widget_info(|| {
        egui::WidgetInfo::selected(egui::accesskit::Role::Button, true, is_selected, format!("Run: {}", entry.name))
    });
    if is_selected || response.hovered() {
        let fill = if is_selected { cx.theme.accent_bg } else { cx.theme.bg_hover };
        ui.painter().rect_filled(rect, radius::SMALL, fill);
    }
    if is_selected {
        ui.scroll_to_rect(rect, None);
    }
    let builder = egui::UiBuilder::new().max_rect(rect.shrink2(vec2(space::S, 0.0)));
    let mut row = ui.new_child(builder.layout(Layout::left_to_right(Align::Center)));
    if let Some(chat) = entry.chat {
        owner_dot(&mut row, cx.hue(chat));
    }
    right_to_left(&mut row, |ui| {
        if !entry.key.is_empty() {
            ui.add(Label::new(small(&entry.key, cx.theme.text_weak)).selectable(false));
        }
        ui.with_layout(Layout::left_to_right(Align::Center), |ui| {
            ui.add(Label::new(RichText::new(&entry.name).color(cx.theme.text)).truncate().selectable(false));
        });
    });
    if response.clicked() {
        cx.send(UiCommand::ClosePalette);
        cx.send(entry.command.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_matches_words_in_any_order_and_case() {
        assert!(matches("Show or hide the dock", "DOCK hide"));
        assert!(matches("Anything", "  "));
        assert!(!matches("New chat", "dock"));
    }
}
