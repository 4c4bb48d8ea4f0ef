//! Where a message is written: draft, context meter, send or stop.

use super::icons::{Icon, paint};
use super::{ViewCtx, right_to_left, small, thin_bar};
use crate::app::chat::Chat;
use crate::app::command::UiCommand;
use crate::app::format;
use crate::app::input_rules::EnterRule;
use crate::app::prompt::context_limit;
use crate::app::state::FocusRequest;
use crate::app::theme::{radius, size, space};
use egui::{
    Align, Frame, Id, Key, KeyboardShortcut, Layout, Margin, Modifiers, Rect, ScrollArea, Sense, Stroke, TextEdit, Ui,
    UiBuilder, Vec2, WidgetInfo, accesskit::Role,
};

/// Above this share of the context the meter warns.
const NEARLY_FULL: f32 = 0.85;
const MAX_TEXT_HEIGHT: f32 = 140.0;

/// What one composer remembers between frames.
#[derive(Default)]
pub struct ComposerView {
    enter: EnterRule,
}

/// How the composer is laid out.
#[derive(Clone, Copy, PartialEq)]
pub struct ComposerOptions {
    pub is_focused: bool,
    /// One line, for low panes.
    pub is_compact: bool,
    pub has_many_panes: bool,
}

pub fn field_id(chat: &Chat) -> Id {
    Id::unique(("composer", chat.id.0))
}

/// Height that the composer takes with a draft of one line.
pub fn height_of(options: ComposerOptions) -> f32 {
    if options.is_compact { 44.0 } else { 84.0 }
}

pub fn composer_ui(cx: &mut ViewCtx<'_>, view: &mut ComposerView, ui: &mut Ui, chat: &Chat, options: ComposerOptions) {
    let id = field_id(chat);
    // Under what stands on it: a click beside the buttons begins to write.
    let ground = UiBuilder::new().id_salt(("composer_ground", chat.id.0)).sense(Sense::CLICK);
    let ground = ui.scope_builder(ground, |ui| {
        ui.style_mut().interaction.selectable_labels = false;
        frame_ui(cx, view, ui, chat, options);
    });
    if ground.response.clicked() {
        ui.memory_mut(|m| m.request_focus(id));
    }
}

fn frame_ui(cx: &mut ViewCtx<'_>, view: &mut ComposerView, ui: &mut Ui, chat: &Chat, options: ComposerOptions) {
    let has_focus = ui.memory(|m| m.has_focus(field_id(chat)));
    let border = if has_focus { cx.theme.accent } else { cx.theme.border_strong };
    let margin = if options.is_compact { space::XS } else { space::S };
    Frame::new()
        .fill(cx.theme.bg_sunken)
        .stroke(Stroke::new(1.0, border))
        .corner_radius(radius::LARGE)
        .inner_margin(Margin::symmetric(space::M as i8, margin as i8))
        .show(ui, |ui| {
            ui.set_width(ui.available_width());
            if options.is_compact {
                let row = Vec2::new(ui.available_width(), 28.0);
                ui.allocate_ui_with_layout(row, Layout::right_to_left(Align::Center), |ui| {
                    action_ui(cx, ui, chat);
                    field_ui(cx, view, ui, chat, options);
                });
            } else {
                field_ui(cx, view, ui, chat, options);
                ui.horizontal(|ui| foot_ui(cx, ui, chat, options));
            }
        });
}

fn field_ui(cx: &mut ViewCtx<'_>, view: &mut ComposerView, ui: &mut Ui, chat: &Chat, options: ComposerOptions) {
    let id = field_id(chat);
    let mut text = chat.draft.clone();
    let hint = match (cx.state.model(), &cx.state.remote_host) {
        (Some(_), _) => "Type a message",
        (None, Some(_)) => "Type a message; the engine is not there yet",
        (None, None) => "Type a message; load a model to send it",
    };
    let field = TextEdit::multiline(&mut text)
        .id(id)
        .hint_text(hint)
        .frame(Frame::NONE)
        .margin(Margin::symmetric(0, space::XS as i8))
        .desired_width(f32::INFINITY)
        .desired_rows(1)
        .return_key(KeyboardShortcut::new(Modifiers::SHIFT, Key::Enter));
    let salt = ("composer_scroll", chat.id.0);
    let max_height = if options.is_compact { size::CLICK + space::S } else { MAX_TEXT_HEIGHT };
    let scroll = ScrollArea::vertical().id_salt(salt).max_height(max_height).min_scrolled_height(size::CLICK);
    let response = scroll.show(ui, |ui| ui.add(field)).inner;
    let owns_input = ui.memory(|m| m.owns_ime_events(id));
    let sends = ui.input(|i| view.enter.frame(&i.events, owns_input));
    if text != chat.draft {
        cx.send(UiCommand::SetDraft { chat: chat.id, text: text.clone() });
    }
    if sends {
        cx.send(UiCommand::Send(chat.id));
    }
    let wants_edit = response.has_focus() && chat.draft.is_empty() && ui.input(|i| i.key_pressed(Key::ArrowUp));
    if wants_edit && cx.state.run_of(chat.id).is_none() {
        cx.send(UiCommand::EditLast(chat.id));
    }
    if options.is_focused && cx.state.focus == Some(FocusRequest::Composer) {
        response.request_focus();
    }
}

fn foot_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, chat: &Chat, options: ComposerOptions) {
    meter_ui(cx, ui, chat);
    right_to_left(ui, |ui| {
        action_ui(cx, ui, chat);
        if options.has_many_panes && options.is_focused {
            let mut to_all = cx.state.panes.send_to_all;
            if ui.checkbox(&mut to_all, small("Send to all panes", cx.theme.text)).changed() {
                cx.send(UiCommand::SetSendToAll(to_all));
            }
        } else if ui.available_width() > 230.0 {
            ui.label(small("Enter to send · Shift+Enter for a new line", cx.theme.text_faint));
        }
    });
}

/// Tokens that the next turn would send, of those the context holds.
fn meter_ui(cx: &ViewCtx<'_>, ui: &mut Ui, chat: &Chat) {
    let (Some(model), Some(tokens)) = (cx.state.model(), cx.state.context_tokens(chat)) else { return };
    let limit = context_limit(model);
    let share = tokens as f32 / limit.max(1) as f32;
    let color = if share > NEARLY_FULL { cx.theme.warn } else { cx.hue(chat.id) };
    thin_bar(ui, 56.0, share, color, cx.theme.bg_active);
    let text = format!("{} / {} tokens", format::count(tokens.into()), format::count(limit.into()));
    let help = "Context: tokens that the next turn sends, of those that fit. An empty chat sends the words that the model's \
                template puts around it.";
    ui.label(small(text, cx.theme.text_weak)).on_hover_text(help);
}

/// Send, or stop while an answer is under way: the same place, the same size.
fn action_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, chat: &Chat) {
    let is_running = cx.state.run_of(chat.id).is_some();
    let can_send = cx.state.can_send(chat.id) && !chat.draft.trim().is_empty();
    let (icon, label, command) = match is_running {
        true => (Icon::Stop, "Stop", UiCommand::Stop(chat.id)),
        false => (Icon::Send, "Send", UiCommand::Send(chat.id)),
    };
    let is_enabled = is_running || can_send;
    let sense = if is_enabled { Sense::click() } else { Sense::hover() };
    let (rect, response) = ui.allocate_exact_size(Vec2::splat(28.0), sense);
    response.widget_info(|| WidgetInfo::labeled(Role::Button, is_enabled, label));
    let (fill, color) = match (is_enabled, is_running, response.hovered()) {
        (false, ..) => (cx.theme.bg_active, cx.theme.text_faint),
        (true, true, false) => (cx.theme.bg_active, cx.theme.text_strong),
        (true, true, true) => (cx.theme.bg_hover, cx.theme.text_strong),
        (true, false, _) => (cx.theme.accent, cx.theme.on_accent),
    };
    ui.painter().circle_filled(rect.center(), 14.0, fill);
    if response.has_focus() {
        ui.painter().circle_stroke(rect.center(), 14.5, Stroke::new(1.5, cx.theme.text_strong));
    }
    paint(ui.painter(), Rect::from_center_size(rect.center(), Vec2::splat(16.0)), icon, color);
    if response.on_hover_text(label).clicked() {
        cx.send(command);
    }
}
