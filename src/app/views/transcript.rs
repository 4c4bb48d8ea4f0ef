//! The messages of one chat: a long list of which only the visible part is laid out.
//!
//! Guarantees: work per frame depends on what is visible; heights are measured once per width and text; while following,
//! the end stays in view; otherwise what the reader looks at stays where it is, also when text above is measured anew.

use super::icons::{Icon, paint};
use super::message::{MessageView, message_ui};
use super::{ViewCtx, primary_button, small};
use crate::app::chat::{Chat, Message, MessageId, Role};
use crate::app::command::UiCommand;
use crate::app::format;
use crate::app::input_rules::{FollowRule, ScrollInput};
use crate::app::state::ContextFull;
use crate::app::theme::{radius, space};
use egui::{Frame, Key, Margin, Rect, ScrollArea, Stroke, Ui, UiBuilder, Vec2, pos2, vec2};
use std::collections::HashMap;

/// The text column is at most this wide.
pub const COLUMN: f32 = 760.0;
/// Rows this close to the viewport are laid out too, so that they are measured before they are seen.
const OVERSCAN: f32 = 200.0;
/// Views of messages that were not drawn lately are dropped beyond this many.
const MAX_VIEWS: usize = 400;

/// What one transcript remembers between frames.
#[derive(Default)]
pub struct TranscriptView {
    pub follow: FollowRule,
    heights: HashMap<MessageId, Measured>,
    views: HashMap<MessageId, MessageView>,
    last_offset: f32,
    pending_offset: Option<f32>,
    end_distance: f32,
    frame: u64,
}

#[derive(Clone, Copy)]
struct Measured {
    width: f32,
    text_len: usize,
    is_running: bool,
    height: f32,
}

pub fn transcript_ui(cx: &mut ViewCtx<'_>, view: &mut TranscriptView, ui: &mut Ui, chat: &Chat, is_focused: bool) {
    view.frame += 1;
    let area = ui.available_rect_before_wrap();
    let column = (area.width() - 2.0 * space::L).min(COLUMN);
    let total: f32 = chat.path().iter().filter_map(|id| chat.message(*id)).map(|m| view.height(m, column)).sum();
    let full = cx.state.context_full.get(&chat.id).copied();
    let total = total + space::L + space::M + if full.is_some() { 110.0 } else { 0.0 };
    let input = scroll_input(ui, area, is_focused);
    let mut scroll = ScrollArea::vertical().id_salt(("transcript", chat.id.0)).auto_shrink([false, false]);
    let target = match (view.follow.is_following || input.to_end, input.jump) {
        (true, _) => Some(total - area.height()),
        (false, Jump::None) => view.pending_offset,
        (false, Jump::Start) => Some(0.0),
        (false, Jump::Pages(pages)) => Some(view.last_offset + pages * area.height() * 0.9),
    };
    view.pending_offset = None;
    if let Some(offset) = target {
        scroll = scroll.vertical_scroll_offset(offset.clamp(0.0, (total - area.height()).max(0.0)));
    }
    let output = scroll.show_viewport(ui, |ui, viewport| rows_ui(cx, view, ui, chat, viewport, column, full));
    let (shift, offset) = (output.inner, output.state.clamped_offset().y);
    if shift != 0.0 && !view.follow.is_following {
        // Rows above the viewport turned out higher or lower than thought: keep what is read in place.
        view.pending_offset = Some(offset + shift);
        ui.ctx().request_repaint();
    }
    view.end_distance = output.content_size.y - offset - output.inner_rect.height();
    let is_dragged_up = ui.input(|i| i.pointer.any_down()) && offset < view.last_offset - 0.5;
    let rule = ScrollInput { is_upward: input.rule.is_upward || is_dragged_up, ..input.rule };
    view.follow.frame(ScrollInput { to_end: input.to_end, ..rule }, view.end_distance);
    view.last_offset = offset;
    if view.follow.is_following && view.end_distance > 1.0 {
        // The last row grew in this frame.
        ui.ctx().request_repaint();
    }
    if !view.follow.is_following && view.end_distance > output.inner_rect.height().min(160.0) {
        pill_ui(cx, view, ui, output.inner_rect, chat);
    }
    view.forget_old();
}

impl TranscriptView {
    /// Offset from the top, and distance from the end.
    pub fn scroll(&self) -> (f32, f32) {
        (self.last_offset, self.end_distance)
    }

    fn height(&self, message: &Message, width: f32) -> f32 {
        match self.heights.get(&message.id) {
            Some(m) if m.width == width => m.height,
            _ => estimated_height(message, width),
        }
    }

    /// True when the row must not be skipped: its height is not known for this text.
    fn is_stale(&self, message: &Message, width: f32) -> bool {
        self.heights.get(&message.id).is_none_or(|m| {
            m.width != width || m.text_len != message.content.len() || m.is_running != message.is_running()
        })
    }

    fn forget_old(&mut self) {
        if self.views.len() > MAX_VIEWS {
            let frame = self.frame;
            self.views.retain(|_, v| frame - v.last_frame < 60);
        }
    }
}

/// A guess from the number of lines, for rows that were never seen.
fn estimated_height(message: &Message, width: f32) -> f32 {
    let chars_per_line = (width / 6.5).max(10.0);
    let lines: f32 = message.content.lines().map(|l| (l.len() as f32 / chars_per_line).ceil().max(1.0)).sum();
    64.0 + lines * 18.0
}

/// Draws the visible rows; returns how much the rows above the viewport changed in height.
fn rows_ui(
    cx: &mut ViewCtx<'_>,
    view: &mut TranscriptView,
    ui: &mut Ui,
    chat: &Chat,
    viewport: Rect,
    column: f32,
    full: Option<ContextFull>,
) -> f32 {
    let origin = ui.max_rect().min;
    let left = origin.x + (ui.max_rect().width() - column).max(0.0) / 2.0;
    let mut y = space::L;
    let mut shift = 0.0;
    for message in chat.path().iter().filter_map(|id| chat.message(*id)) {
        let height = view.height(message, column);
        let is_near = y + height >= viewport.min.y - OVERSCAN && y <= viewport.max.y + OVERSCAN;
        if !(is_near || message.is_running() && view.is_stale(message, column)) {
            y += height;
            continue;
        }
        let rect = Rect::from_min_size(pos2(left, origin.y + y), Vec2::new(column, height));
        let builder = UiBuilder::new().max_rect(rect).id_salt(("message", message.id.0));
        let mut row = ui.new_child(builder);
        let message_view = view.views.entry(message.id).or_default();
        message_view.last_frame = view.frame;
        message_ui(cx, message_view, &mut row, chat, message);
        let gap = if message.role == Role::User { 0.0 } else { space::L };
        let measured = (row.min_rect().height() + gap).ceil();
        if y + height <= viewport.min.y {
            shift += measured - height;
        }
        let (text_len, is_running) = (message.content.len(), message.is_running());
        view.heights.insert(message.id, Measured { width: column, text_len, is_running, height: measured });
        y += measured;
    }
    if let Some(full) = full {
        let rect = Rect::from_min_size(pos2(left, origin.y + y), Vec2::new(column, 90.0));
        let mut row = ui.new_child(UiBuilder::new().max_rect(rect).id_salt("context_full"));
        context_full_ui(cx, &mut row, chat, full);
        y += row.min_rect().height() + space::L;
    }
    let end = Rect::from_min_size(origin, Vec2::new(ui.max_rect().width(), y + space::M));
    ui.expand_to_include_rect(end);
    shift
}

/// Where the keyboard wants to go.
#[derive(Clone, Copy, PartialEq)]
enum Jump {
    None,
    Start,
    /// Down is positive.
    Pages(f32),
}

/// What the user asks of this transcript in this frame.
struct Asked {
    rule: ScrollInput,
    jump: Jump,
    to_end: bool,
}

/// Read before the scroll area takes the wheel for itself.
fn scroll_input(ui: &Ui, rect: Rect, is_focused: bool) -> Asked {
    let is_over = ui.rect_contains_pointer(rect);
    let has_keys = is_focused && !ui.ctx().text_edit_focused();
    ui.input(|i| {
        let wheel = if is_over { i.smooth_scroll_delta().y } else { 0.0 };
        let jump = match () {
            () if has_keys && i.key_pressed(Key::Home) => Jump::Start,
            () if is_focused && i.key_pressed(Key::PageUp) => Jump::Pages(-1.0),
            () if is_focused && i.key_pressed(Key::PageDown) => Jump::Pages(1.0),
            () => Jump::None,
        };
        let is_upward = wheel > 0.0 || jump == Jump::Start || jump == Jump::Pages(-1.0);
        let is_downward = wheel < 0.0 || jump == Jump::Pages(1.0);
        let to_end = has_keys && i.key_pressed(Key::End);
        Asked { rule: ScrollInput { is_upward, is_downward, to_end }, jump, to_end }
    })
}

/// "New text" below the viewport: click to follow again.
fn pill_ui(cx: &ViewCtx<'_>, view: &mut TranscriptView, ui: &mut Ui, rect: Rect, chat: &Chat) {
    let text = if chat.running_message().is_some() { "New text" } else { "To the end" };
    let font = egui::TextStyle::Small.resolve(ui.style());
    let galley = ui.painter().layout_no_wrap(text.into(), font, cx.theme.text_strong);
    let size = galley.size() + vec2(space::L * 2.0 + space::S, space::S + 2.0);
    let center = rect.center_bottom() - vec2(0.0, size.y / 2.0 + space::S);
    let pill = Rect::from_center_size(center, size);
    let id = ui.scope_id().with(("pill", chat.id.0));
    let response = ui.interact(pill, id, egui::Sense::click());
    response.widget_info(|| egui::WidgetInfo::labeled(egui::accesskit::Role::Button, true, text));
    let fill = if response.hovered() { cx.theme.bg_hover } else { cx.theme.bg_raised };
    ui.painter().rect(
        pill,
        pill.height() / 2.0,
        fill,
        Stroke::new(1.0, cx.theme.border_strong),
        egui::StrokeKind::Inside,
    );
    let icon = Rect::from_center_size(pill.left_center() + vec2(space::L, 0.0), Vec2::splat(14.0));
    paint(ui.painter(), icon, Icon::Down, cx.theme.text_strong);
    let at = pos2(icon.right() + space::XS, pill.center().y - galley.size().y / 2.0);
    ui.painter().galley(at, galley, cx.theme.text_strong);
    if response.clicked() {
        view.follow.is_following = true;
        ui.ctx().request_repaint();
    }
}

/// "This turn does not fit": says both numbers and offers what helps.
fn context_full_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, chat: &Chat, full: ContextFull) {
    Frame::new()
        .fill(cx.theme.bg_raised)
        .stroke(Stroke::new(1.0, cx.theme.warn))
        .corner_radius(radius::MEDIUM)
        .inner_margin(Margin::same(space::M as i8))
        .show(ui, |ui| {
            ui.set_width(ui.available_width());
            ui.label(format!(
                "This turn needs {} of {} tokens.",
                format::count(full.needed.into()),
                format::count(full.limit.into())
            ));
            if full.drop.is_none() {
                ui.label(small("Even this turn alone is too long for the context.", cx.theme.text_weak));
            }
            ui.horizontal_wrapped(|ui| {
                if let Some(drop) = full.drop {
                    let text = format!("Drop {}", format::counted(drop.num_turns.into(), "oldest turn"));
                    if primary_button(ui, &cx.theme, &text).clicked() {
                        cx.send(UiCommand::DropOldest(chat.id));
                    }
                }
                if ui.button("Cancel").clicked() {
                    cx.send(UiCommand::CancelTurn(chat.id));
                }
            });
        });
}
