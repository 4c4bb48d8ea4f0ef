//! One message: its heading, its text as markdown, what it is doing or what it cost, and its actions.
//!
//! Guarantees: actions appear only when the message is complete, and their room is kept, so that nothing moves; blocks
//! outside the view are not laid out once their height is known.

use super::icons::{Icon, sized_icon_button};
use super::{ViewCtx, owner_dot, primary_button, quiet_button, right_to_left, small, thin_bar};
use crate::app::chat::{Chat, Message, Role, RunRecord, RunStatus};
use crate::app::command::UiCommand;
use crate::app::format;
use crate::app::markdown::{Block, BlockKind, MarkdownDoc};
use crate::app::state::{ActiveRun, AppState, Phase};
use crate::app::theme::{font_size, radius, size, space};
use crate::app::words;
use crate::telemetry::RequestState;
use egui::{Button, CornerRadius, Frame, Label, Margin, Rect, RichText, ScrollArea, Stroke, TextEdit, Ui, Vec2};
use egui_commonmark::CommonMarkViewer;

/// What one message remembers between frames.
#[derive(Default)]
pub struct MessageView {
    doc: MarkdownDoc,
    heights: Vec<BlockHeight>, // one per block
    pub last_frame: u64,
}

#[derive(Clone, Copy, PartialEq)]
struct BlockHeight {
    width: f32,
    len: usize,
    height: f32,
}

pub fn message_ui(cx: &mut ViewCtx<'_>, view: &mut MessageView, ui: &mut Ui, chat: &Chat, message: &Message) {
    if chat.is_dropped(message.id) {
        ui.multiply_opacity(0.55);
    }
    if chat.context_start == Some(message.id) {
        ui.label(small("Turns above are not sent", cx.theme.text_weak));
        ui.separator();
    }
    match message.role {
        Role::User => user_ui(cx, view, ui, chat, message),
        Role::Assistant => assistant_ui(cx, view, ui, chat, message),
    }
}

fn user_ui(cx: &mut ViewCtx<'_>, view: &mut MessageView, ui: &mut Ui, chat: &Chat, message: &Message) {
    if cx.state.edit.as_ref().is_some_and(|e| e.chat == chat.id && e.message == message.id) {
        return edit_ui(cx, ui);
    }
    let full = ui.available_width();
    let width = bubble_width(ui, &message.content, full - (full * 0.12).min(72.0) - 2.0 * space::M);
    let inner = ui.horizontal_top(|ui| {
        ui.add_space(full - width - 2.0 * space::M);
        Frame::new()
            .fill(cx.theme.bg_hover)
            .corner_radius(radius::LARGE)
            .inner_margin(Margin::symmetric(space::M as i8, space::S as i8))
            .show(ui, |ui| {
                ui.set_width(width);
                ui.vertical(|ui| text_ui(cx, view, ui, &message.content));
            });
    });
    ui.spacing_mut().item_spacing.y = 0.0;
    let is_hovered = ui.rect_contains_pointer(inner.response.rect.expand2(Vec2::new(0.0, size::CLICK)));
    ui.allocate_ui_with_layout(Vec2::new(full, size::CLICK), egui::Layout::right_to_left(egui::Align::Center), |ui| {
        ui.set_min_height(size::CLICK);
        small_actions(ui);
        siblings_ui(cx, ui, chat, message);
        if is_hovered {
            user_actions_ui(cx, ui, chat, message);
        }
    });
}

/// As wide as the text on one line, at most `max`.
fn bubble_width(ui: &Ui, text: &str, max: f32) -> f32 {
    let num_chars = text.chars().take(400).count();
    if text.contains('\n') || num_chars as f32 * 4.0 > max {
        return max;
    }
    let font = egui::TextStyle::Body.resolve(ui.style());
    let line = ui.painter().layout_no_wrap(text.to_owned(), font, ui.visuals().text_color());
    (line.size().x + 1.0).min(max)
}

/// Actions are quieter than the text they belong to.
fn small_actions(ui: &mut Ui) {
    ui.spacing_mut().item_spacing = Vec2::new(2.0, 0.0);
    ui.spacing_mut().button_padding = Vec2::new(ACTION_PADDING, 2.0);
}

const ACTION_PADDING: f32 = 6.0;

fn user_actions_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, chat: &Chat, message: &Message) {
    if quiet_button(ui, "Copy").clicked() {
        cx.send(UiCommand::Copy(message.content.clone()));
    }
    if cx.state.run_of(chat.id).is_none() && quiet_button(ui, "Edit").clicked() {
        cx.send(UiCommand::StartEdit { chat: chat.id, message: message.id });
    }
    if quiet_button(ui, "Branch").on_hover_text("Open as a new chat from here").clicked() {
        cx.send(UiCommand::BranchAsChat { chat: chat.id, message: message.id });
    }
}

fn edit_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let Some(edit) = &cx.state.edit else { return };
    let mut text = edit.text.clone();
    let can_send = cx.state.can_send(edit.chat) && !text.trim().is_empty();
    Frame::new()
        .fill(cx.theme.bg_raised)
        .stroke(Stroke::new(1.0, cx.theme.accent))
        .corner_radius(radius::LARGE)
        .inner_margin(Margin::same(space::M as i8))
        .show(ui, |ui| {
            let field = TextEdit::multiline(&mut text).hint_text("Edited message").desired_width(f32::INFINITY);
            if ui.add(field.desired_rows(3)).changed() {
                cx.send(UiCommand::SetEditText(text.clone()));
            }
            ui.horizontal(|ui| {
                ui.add_enabled_ui(can_send, |ui| {
                    if primary_button(ui, &cx.theme, "Send as new branch").clicked() {
                        cx.send(UiCommand::SubmitEdit);
                    }
                });
                if ui.button("Cancel").clicked() {
                    cx.send(UiCommand::CancelEdit);
                }
            });
        });
}

fn assistant_ui(cx: &mut ViewCtx<'_>, view: &mut MessageView, ui: &mut Ui, chat: &Chat, message: &Message) {
    let active = cx.state.runs.get(&message.id);
    ui.horizontal(|ui| {
        owner_dot(ui, cx.hue(chat.id));
        let name = message.run.as_ref().map_or("Assistant", |r| r.model.as_str());
        ui.add(Label::new(small(name, cx.theme.text_weak)).truncate());
    });
    if !message.content.is_empty() {
        text_ui(cx, view, ui, &message.content);
    }
    match (active, &message.run) {
        (Some(active), run) => running_ui(cx, ui, active, run.as_ref()),
        (None, Some(run)) => ended_ui(cx, ui, chat, message, run),
        (None, None) => {}
    }
}

/// What a run is doing now, in one line of the same height as the actions that follow it.
fn running_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, active: &ActiveRun, run: Option<&RunRecord>) {
    ui.allocate_ui(Vec2::new(ui.available_width(), size::CLICK), |ui| {
        ui.horizontal(|ui| {
            ui.set_min_height(size::CLICK);
            if let Phase::Reading { computed, total } = active.phase {
                let share = computed as f32 / total.max(1) as f32;
                thin_bar(ui, 96.0, share, cx.hue(active.chat), cx.theme.bg_active);
            }
            let text = phase_words(cx.state, active, run);
            ui.add(Label::new(small(text, cx.theme.text_weak)).truncate());
        });
    });
}

/// The phase with its numbers: "Reading 1,536 / 4,096 tokens (1,024 from cache)".
pub fn phase_words(state: &AppState, active: &ActiveRun, run: Option<&RunRecord>) -> String {
    if active.is_stopping {
        return "Stopping…".into();
    }
    match active.phase {
        Phase::Preparing => "Preparing…".into(),
        Phase::Queued => queued_words(state, active),
        Phase::Reading { computed, total } => {
            let counts = format!("{} / {}", format::count(computed.into()), format::count(total.into()));
            match run.map_or(0, |r| r.cached_tokens) {
                0 => format!("Reading {counts} tokens"),
                cached => format!("Reading {counts} tokens ({} from cache)", format::count(cached.into())),
            }
        }
        Phase::Writing => {
            let tokens = format::counted(run.map_or(0, |r| r.output_tokens).into(), "token");
            match active.rate.per_second(state.clock.seconds) {
                Some(rate) => format!("{} tok/s · {tokens}", format::rate(rate.into())),
                None => format!("Writing · {tokens}"),
            }
        }
        Phase::Preempted { kept_tokens } => paused_words(state, active, kept_tokens),
    }
}

/// How a preempted answer will go on: from its blocks in host memory, or from its tokens.
fn paused_words(state: &AppState, active: &ActiveRun, kept_tokens: u32) -> String {
    let info = state.snapshot.requests.iter().find(|r| Some(r.id) == active.request);
    let how = match info.map_or(0, |r| r.swapped_blocks) {
        0 => format!("will read {} again", format::counted(kept_tokens.into(), "token")),
        n => format!("{} of it wait in host memory", format::counted(n.into(), "block")),
    };
    let why = match info.map(|r| r.state) {
        Some(RequestState::Waiting { reason, .. }) => format!(" · {}", words::wait_reason(reason)),
        _ => String::new(),
    };
    format!("Paused for memory · {how}{why}")
}

fn queued_words(state: &AppState, active: &ActiveRun) -> String {
    let info = state.snapshot.requests.iter().find(|r| Some(r.id) == active.request);
    match info.map(|r| r.state) {
        Some(RequestState::Waiting { reason, .. }) => format!("Queued · {}", words::wait_reason(reason)),
        _ => "Queued".into(),
    }
}

fn ended_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, chat: &Chat, message: &Message, run: &RunRecord) {
    if run.status == RunStatus::Failed {
        failed_ui(cx, ui, chat, message, run);
    } else if run.status == RunStatus::Interrupted {
        ui.label(small("Interrupted: the app ended while this was being written", cx.theme.warn));
    }
    ui.horizontal_wrapped(|ui| {
        ui.set_min_height(size::CLICK);
        small_actions(ui);
        // The text of the first action stands under the text of the answer.
        ui.add_space(-ACTION_PADDING);
        siblings_ui(cx, ui, chat, message);
        if cx.state.can_send(chat.id) && quiet_button(ui, "Regenerate").clicked() {
            cx.send(UiCommand::Regenerate { chat: chat.id, message: message.id });
        }
        if !message.content.is_empty() && quiet_button(ui, "Copy").clicked() {
            cx.send(UiCommand::Copy(message.content.clone()));
        }
        if quiet_button(ui, "Branch").on_hover_text("Open as a new chat from here").clicked() {
            cx.send(UiCommand::BranchAsChat { chat: chat.id, message: message.id });
        }
        let metrics = match shares_words(cx.state, chat, message, run) {
            Some(shares) => format!("{shares} · {}", metrics_words(run)),
            None => metrics_words(run),
        };
        if !metrics.is_empty() {
            let text = small(metrics, cx.theme.text_weak);
            let button = Button::new(text).frame_when_inactive(false).wrap();
            if ui.add(button).on_hover_text("Show the last of these steps in Inspect").clicked() {
                cx.send(UiCommand::InspectStep(run.last_step));
            }
        }
    });
}

/// "shares 384 tokens with version 1": the blocks that this answer did not have to compute, where it is another version
/// of an answer or continues a copied chat.
fn shares_words(state: &AppState, chat: &Chat, message: &Message, run: &RunRecord) -> Option<String> {
    if run.cached_tokens == 0 {
        return None;
    }
    let tokens = format::counted(run.cached_tokens.into(), "token");
    let siblings = chat.siblings(message.id);
    if let Some(before) = siblings.iter().position(|s| *s == message.id).filter(|at| *at > 0) {
        return Some(format!("shares {tokens} with version {before}"));
    }
    let source = state.chat(*state.branch_of.get(&chat.id)?)?;
    Some(format!("shares {tokens} with “{}”", source.title))
}

fn failed_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, chat: &Chat, message: &Message, run: &RunRecord) {
    let error = run.error.as_deref().unwrap_or("The answer failed");
    Frame::new()
        .stroke(Stroke::new(1.0, cx.theme.error))
        .corner_radius(radius::MEDIUM)
        .inner_margin(Margin::same(space::S as i8))
        .show(ui, |ui| {
            ui.set_width(ui.available_width());
            ui.add(Label::new(RichText::new(error).color(cx.theme.error)).wrap());
            ui.horizontal(|ui| {
                if cx.state.can_send(chat.id) && ui.button("Retry").clicked() {
                    cx.send(UiCommand::Regenerate { chat: chat.id, message: message.id });
                }
                if ui.button("Copy details").clicked() {
                    cx.send(UiCommand::Copy(format!("{error}\nmodel: {}\n{}", run.model, metrics_words(run))));
                }
            });
        });
}

/// "41 tok/s · 512 tokens · first after 0.21 s · prefix hit 384/402 · max tokens 1,024 · steps 1,204–1,716".
pub fn metrics_words(run: &RunRecord) -> String {
    let mut parts: Vec<String> = Vec::new();
    if let Some(rate) = run.tokens_per_second() {
        parts.push(format!("{} tok/s", format::rate(rate.into())));
    }
    if run.output_tokens > 0 {
        parts.push(format::counted(run.output_tokens.into(), "token"));
    }
    if run.ttft_us > 0 {
        parts.push(format!("first after {}", format::duration_us(run.ttft_us)));
    }
    if run.cached_tokens > 0 {
        let (cached, prompt) = (format::count(run.cached_tokens.into()), format::count(run.prompt_tokens.into()));
        parts.push(format!("prefix hit {cached}/{prompt}"));
    }
    if run.preemptions > 0 {
        parts.push(format::counted(run.preemptions.into(), "preemption"));
    }
    if !run.stop_reason.is_empty() {
        parts.push(run.stop_reason.clone());
    }
    if run.last_step > 0 {
        parts.push(format!("steps {}–{}", format::count(run.first_step), format::count(run.last_step)));
    }
    parts.join(" · ")
}

/// ◂ 2/3 ▸ where a message has siblings.
fn siblings_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, chat: &Chat, message: &Message) {
    let siblings = chat.siblings(message.id);
    if siblings.len() < 2 || cx.state.run_of(chat.id).is_some() {
        return;
    }
    let at = siblings.iter().position(|s| *s == message.id).unwrap_or(0);
    let is_reversed = ui.layout().prefer_right_to_left();
    let side = Vec2::new(16.0, size::CLICK);
    let mut step = |ui: &mut Ui, icon: Icon, label: &str, offset: isize| {
        let is_there = at.checked_add_signed(offset).is_some_and(|i| i < siblings.len());
        let clicked = ui.add_enabled_ui(is_there, |ui| sized_icon_button(ui, icon, label, side, false).clicked()).inner;
        if clicked {
            cx.commands.push(UiCommand::SelectSibling { chat: chat.id, message: message.id, offset });
        }
    };
    let text = small(format!("{}/{}", at + 1, siblings.len()), cx.theme.text_weak);
    if is_reversed {
        step(ui, Icon::Right, "Next version", 1);
        ui.label(text);
        step(ui, Icon::Left, "Previous version", -1);
    } else {
        step(ui, Icon::Left, "Previous version", -1);
        ui.label(text);
        step(ui, Icon::Right, "Next version", 1);
    }
}

/// Markdown, block by block. Blocks out of view keep their room and are not laid out.
fn text_ui(cx: &mut ViewCtx<'_>, view: &mut MessageView, ui: &mut Ui, text: &str) {
    view.doc.update(text);
    view.heights.truncate(view.doc.blocks().len());
    let width = ui.available_width();
    let clip = ui.clip_rect();
    ui.spacing_mut().item_spacing.y = space::S;
    for (i, block) in view.doc.blocks().iter().enumerate() {
        let known = view.heights.get(i).filter(|h| h.width == width && h.len == block.range.len());
        if let Some(known) = known {
            let rect = Rect::from_min_size(ui.cursor().min, Vec2::new(width, known.height));
            if !clip.intersects(rect) {
                ui.allocate_space(rect.size());
                continue;
            }
        }
        let response = ui.push_id(block.range.start, |ui| block_ui(cx, ui, block, text)).response;
        let measured = BlockHeight { width, len: block.range.len(), height: response.rect.height() };
        match view.heights.get_mut(i) {
            Some(height) => *height = measured,
            None => view.heights.push(measured),
        }
    }
}

fn block_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, block: &Block, text: &str) {
    match &block.kind {
        BlockKind::Text => {
            CommonMarkViewer::new().show(ui, cx.markdown, text[block.range.clone()].trim_end());
        }
        BlockKind::Code { language, body } => code_ui(cx, ui, language, text[body.clone()].trim_end_matches('\n')),
    }
}

fn code_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, language: &str, code: &str) {
    Frame::new()
        .fill(cx.theme.bg_sunken)
        .stroke(Stroke::new(1.0, cx.theme.border))
        .corner_radius(CornerRadius::same(radius::MEDIUM))
        .inner_margin(Margin::symmetric(space::M as i8, space::S as i8))
        .show(ui, |ui| {
            ui.set_width(ui.available_width());
            ui.horizontal(|ui| {
                ui.label(small(if language.is_empty() { "code" } else { language }, cx.theme.text_weak));
                right_to_left(ui, |ui| {
                    if quiet_button(ui, "Copy code").clicked() {
                        cx.send(UiCommand::Copy(code.to_owned()));
                    }
                });
            });
            let text = RichText::new(code).monospace().size(font_size::MONO).color(cx.theme.text);
            ScrollArea::horizontal().show(ui, |ui| ui.add(Label::new(text).extend()));
        });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_name_what_is_known_and_nothing_else() {
        let mut run = RunRecord::started("m".into());
        assert_eq!(metrics_words(&run), "");
        run.output_tokens = 512;
        run.decode_us = 12_463_414;
        run.ttft_us = 210_000;
        run.prompt_tokens = 402;
        run.cached_tokens = 384;
        run.stop_reason = "max tokens 512".into();
        (run.first_step, run.last_step) = (1204, 1716);
        assert_eq!(
            metrics_words(&run),
            "41 tok/s · 512 tokens · first after 210 ms · prefix hit 384/402 · max tokens 512 · steps 1,204–1,716"
        );
    }
}
