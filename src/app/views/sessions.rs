//! The list of chats: new, filter, groups by day, running state, undo of a deletion.

use super::icons::{Icon, icon_button};
use super::{ViewCtx, owner_dot, quiet_button, right_to_left, small};
use crate::app::chat::{Chat, ChatId};
use crate::app::command::UiCommand;
use crate::app::format;
use crate::app::state::{ActiveRun, AppState, Phase, Workspace};
use crate::app::theme::{radius, space};
use egui::{Align, Button, Color32, Label, Layout, RichText, ScrollArea, Sense, TextEdit, Ui, UiBuilder, Vec2};

const ROW_HEIGHT: f32 = 30.0;
const DAY_MS: i64 = 86_400_000;

/// What this list remembers between frames.
#[derive(Default)]
pub struct SessionsView {
    renaming: Option<(ChatId, String)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Row {
    Group(&'static str),
    Chat(ChatId),
}

pub fn sessions_ui(cx: &mut ViewCtx<'_>, view: &mut SessionsView, ui: &mut Ui) {
    head_ui(cx, ui);
    foot_ui(cx, ui);
    let rows = rows_of(cx);
    if rows.is_empty() {
        let text = if cx.state.session_filter.is_empty() { "No chats yet. Ctrl+N" } else { "No chat has this name" };
        ui.add_space(space::M);
        ui.label(small(text, cx.theme.text_weak));
        return;
    }
    ui.spacing_mut().item_spacing.y = 0.0;
    ScrollArea::vertical().id_salt("sessions").auto_shrink([false, false]).show_rows(
        ui,
        ROW_HEIGHT,
        rows.len(),
        |ui, range| {
            for row in &rows[range] {
                match row {
                    Row::Group(name) => group_ui(cx, ui, name),
                    Row::Chat(id) => {
                        if let Some(chat) = cx.state.chat(*id) {
                            row_ui(cx, view, ui, chat);
                        }
                    }
                }
            }
        },
    );
}

fn head_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    ui.horizontal(|ui| {
        let new = Button::new("New chat").shortcut_text(small("Ctrl+N", cx.theme.text_faint));
        if ui.add_sized([ui.available_width(), 28.0], new).clicked() {
            cx.send(UiCommand::NewChat);
        }
    });
    let mut filter = cx.state.session_filter.clone();
    let edit = TextEdit::singleline(&mut filter).hint_text("Filter chats").desired_width(f32::INFINITY);
    if ui.add(edit).changed() {
        cx.send(UiCommand::SetSessionFilter(filter));
    }
    ui.add_space(space::XS);
}

/// Running chats and the undo of a deletion, at the foot of the list.
fn foot_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let num_running = cx.state.runs.len();
    let deleted = cx.state.deleted.as_ref().map(|d| d.chat.title.clone());
    if num_running == 0 && deleted.is_none() {
        return;
    }
    egui::Panel::bottom("sessions_foot").frame(egui::Frame::NONE).show_separator_line(false).show(ui, |ui| {
        ui.add_space(space::XS);
        if let Some(title) = deleted {
            ui.horizontal(|ui| {
                right_to_left(ui, |ui| {
                    if ui.button("Undo").clicked() {
                        cx.send(UiCommand::UndoDelete);
                    }
                    ui.with_layout(Layout::left_to_right(Align::Center), |ui| {
                        ui.add(Label::new(small(format!("Deleted “{title}”"), cx.theme.text_weak)).truncate());
                    });
                });
            });
        }
        if num_running > 0 {
            ui.horizontal(|ui| {
                ui.label(small(format!("{num_running} running"), cx.theme.text_weak));
                right_to_left(ui, |ui| {
                    if quiet_button(ui, "Stop all").clicked() {
                        cx.send(UiCommand::StopAll);
                    }
                });
            });
        }
    });
}

/// Chats in the order of their last use, under the heading of their day.
fn rows_of(cx: &ViewCtx<'_>) -> Vec<Row> {
    let filter = cx.state.session_filter.trim().to_lowercase();
    let now = cx.state.clock.unix_ms;
    let mut rows = Vec::with_capacity(cx.state.order.len() + 3);
    let mut group = "";
    for id in &cx.state.order {
        let Some(chat) = cx.state.chat(*id) else { continue };
        // A chat that nobody has used stands in the list only while it is open.
        if AppState::is_blank(chat) && !cx.state.panes.chats.contains(id) {
            continue;
        }
        if !filter.is_empty() && !chat.title.to_lowercase().contains(&filter) {
            continue;
        }
        let name = group_of(chat.updated_ms, now);
        if name != group {
            rows.push(Row::Group(name));
            group = name;
        }
        rows.push(Row::Chat(*id));
    }
    rows
}

fn group_of(updated_ms: i64, now_ms: i64) -> &'static str {
    let offset_ms = i64::from(jiff::tz::TimeZone::system().to_offset(jiff::Timestamp::UNIX_EPOCH).seconds()) * 1000;
    let day = |ms: i64| (ms + offset_ms).div_euclid(DAY_MS);
    match day(now_ms) - day(updated_ms) {
        i64::MIN..=0 => "Today",
        1 => "Yesterday",
        2..=7 => "Last 7 days",
        _ => "Earlier",
    }
}

fn group_ui(cx: &ViewCtx<'_>, ui: &mut Ui, name: &str) {
    let (rect, _) = ui.allocate_exact_size(Vec2::new(ui.available_width(), ROW_HEIGHT), Sense::hover());
    let text = rect.left_bottom() + egui::vec2(space::XS, -space::XS);
    ui.painter().text(
        text,
        egui::Align2::LEFT_BOTTOM,
        name,
        egui::TextStyle::Small.resolve(ui.style()),
        cx.theme.text_weak,
    );
}

fn row_ui(cx: &mut ViewCtx<'_>, view: &mut SessionsView, ui: &mut Ui, chat: &Chat) {
    if view.renaming.as_ref().is_some_and(|(id, _)| *id == chat.id) {
        return rename_ui(cx, view, ui);
    }
    let (rect, _) = ui.allocate_exact_size(Vec2::new(ui.available_width(), ROW_HEIGHT), Sense::hover());
    let id = ui.make_persistent_id(("session", chat.id));
    let response = ui.interact(rect, id, Sense::click());
    let is_focused = cx.state.panes.focused_chat() == chat.id && cx.state.workspace == Workspace::Chat;
    response.widget_info(|| {
        egui::WidgetInfo::selected(egui::accesskit::Role::Button, true, is_focused, format!("Chat {}", chat.title))
    });
    let is_shown = cx.state.panes.chats.contains(&chat.id);
    let fill = if is_focused {
        cx.theme.accent_bg
    } else if response.hovered() {
        cx.theme.bg_hover
    } else {
        Color32::TRANSPARENT
    };
    ui.painter().rect_filled(rect.shrink2(egui::vec2(0.0, 1.0)), radius::MEDIUM, fill);
    let inner = rect.shrink2(egui::vec2(space::XS, 0.0));
    let builder = UiBuilder::new().max_rect(inner).layout(Layout::right_to_left(Align::Center)).id_salt(id);
    let mut row = ui.new_child(builder);
    row.spacing_mut().item_spacing.x = space::XS;
    let run = cx.state.run_of(chat.id).map(|(_, run)| run);
    let is_menu_open = egui::Popup::is_id_open(ui.ctx(), id.with("menu"));
    let is_hovered = ui.rect_contains_pointer(rect) || is_menu_open;
    if is_hovered {
        menu_ui(cx, view, &mut row, chat, id);
    } else if let Some(run) = run {
        let text = run_words(run, cx.state.clock.seconds);
        row.add(Label::new(small(text, cx.theme.text_weak)).selectable(false));
    }
    row.with_layout(Layout::left_to_right(Align::Center), |ui| {
        let has_hue = is_shown || run.is_some();
        let color = if has_hue { cx.hue(chat.id) } else { cx.theme.bg_active };
        owner_dot(ui, color);
        let color = if is_focused { cx.theme.text_strong } else { cx.theme.text };
        ui.add(Label::new(RichText::new(&chat.title).color(color)).truncate().selectable(false));
    });
    if response.clicked() {
        cx.send(UiCommand::OpenChat(chat.id));
    }
    if response.double_clicked() {
        view.renaming = Some((chat.id, chat.title.clone()));
    }
}

fn menu_ui(cx: &mut ViewCtx<'_>, view: &mut SessionsView, ui: &mut Ui, chat: &Chat, id: egui::Id) {
    let button = icon_button(ui, Icon::More, &format!("Actions of {}", chat.title));
    egui::Popup::menu(&button).id(id.with("menu")).show(|ui| {
        if ui.button("Open beside").clicked() {
            cx.send(UiCommand::OpenInSplit(chat.id));
        }
        if ui.button("Rename").clicked() {
            view.renaming = Some((chat.id, chat.title.clone()));
        }
        let has_prompt = !chat.settings.system_prompt.trim().is_empty() && cx.state.model().is_some();
        let pin = ui.add_enabled(has_prompt, egui::Button::new("Pin system prompt"));
        let hint = "Its KV blocks stay in the cache, also while no chat uses them";
        if pin.on_hover_text(hint).on_disabled_hover_text("This chat has no system prompt").clicked() {
            cx.send(UiCommand::PinSystemPrompt(chat.id));
        }
        if cx.state.run_of(chat.id).is_some() && ui.button("Stop").clicked() {
            cx.send(UiCommand::Stop(chat.id));
        }
        if ui.button("Delete").clicked() {
            cx.send(UiCommand::DeleteChat(chat.id));
        }
    });
}

fn rename_ui(cx: &mut ViewCtx<'_>, view: &mut SessionsView, ui: &mut Ui) {
    let Some((id, title)) = &mut view.renaming else { return };
    let edit = TextEdit::singleline(title).hint_text("Name of the chat").desired_width(f32::INFINITY);
    let response = ui.add_sized([ui.available_width(), ROW_HEIGHT], edit);
    let is_cancelled = ui.input(|i| i.key_pressed(egui::Key::Escape));
    if response.lost_focus() {
        if !is_cancelled {
            cx.send(UiCommand::RenameChat { chat: *id, title: title.clone() });
        }
        view.renaming = None;
    } else if !response.has_focus() {
        response.request_focus();
    }
}

/// The state of a run in two words, for the end of a row or a header.
pub fn run_words(run: &ActiveRun, now_s: f64) -> String {
    match run.phase {
        _ if run.is_stopping => "stopping".into(),
        Phase::Preparing => "preparing".into(),
        Phase::Queued => "queued".into(),
        Phase::Reading { computed, total } => format!("reading {}", format::percent(computed.into(), total.into())),
        Phase::Writing => match run.rate.per_second(now_s) {
            Some(rate) => format!("{} tok/s", format::rate(rate.into())),
            None => "writing".into(),
        },
        Phase::Preempted { .. } => "paused".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_go_by_calendar_day() {
        let now = 20_000 * DAY_MS + DAY_MS / 2;
        assert_eq!(group_of(now, now), "Today");
        assert_eq!(group_of(now + 5 * DAY_MS, now), "Today", "a clock that was set back");
        assert_eq!(group_of(now - DAY_MS, now), "Yesterday");
        assert_eq!(group_of(now - 3 * DAY_MS, now), "Last 7 days");
        assert_eq!(group_of(now - 30 * DAY_MS, now), "Earlier");
    }
}
