//! The Chat workspace: up to four chats side by side.

use super::composer::{ComposerOptions, ComposerView, composer_ui, height_of};
use super::icons::{Icon, icon_button};
use super::sessions::run_words;
use super::transcript::{COLUMN, TranscriptView, transcript_ui};
use super::{ViewCtx, owner_dot, small, welcome};
use crate::app::chat::{Chat, ChatId};
use crate::app::command::UiCommand;
use crate::app::state::AppState;
use crate::app::theme::{radius, space};
use egui::{Align, Label, Layout, Rect, RichText, Stroke, StrokeKind, Ui, UiBuilder, Vec2, pos2, vec2};
use std::collections::HashMap;

/// Below this width, panes become tabs.
const MIN_SPLIT_WIDTH: f32 = 640.0;
/// Three panes stand in one row from this width on.
const MIN_THREE_WIDTH: f32 = 1080.0;
/// Two panes stand side by side from this width on, else above each other.
const MIN_TWO_WIDTH: f32 = 620.0;
/// Panes lower than this get a composer of one line.
const MIN_TALL: f32 = 360.0;
const HEADER: f32 = 32.0;
const TAB_BAR: f32 = 34.0;

/// What the panes remember between frames, by chat.
#[derive(Default)]
pub struct ChatView {
    transcripts: HashMap<ChatId, TranscriptView>,
    composers: HashMap<ChatId, ComposerView>,
}

impl ChatView {
    /// Whether the transcript of a chat follows its end.
    pub fn is_following(&self, chat: ChatId) -> bool {
        self.transcripts.get(&chat).is_none_or(|t| t.follow.is_following)
    }

    /// How far the transcript of a chat is scrolled down, and how far below the view it ends, in points.
    pub fn scroll(&self, chat: ChatId) -> Option<(f32, f32)> {
        self.transcripts.get(&chat).map(TranscriptView::scroll)
    }
}

pub fn chat_workspace_ui(cx: &mut ViewCtx<'_>, view: &mut ChatView, ui: &mut Ui) {
    if welcome::is_due(cx.state) {
        return welcome::welcome_ui(cx, ui);
    }
    let area = ui.available_rect_before_wrap();
    let panes = &cx.state.panes.chats;
    view.transcripts.retain(|id, _| panes.contains(id));
    view.composers.retain(|id, _| panes.contains(id));
    if panes.len() > 1 && area.width() < MIN_SPLIT_WIDTH {
        let tabs = Rect::from_min_size(area.min, vec2(area.width(), TAB_BAR));
        tabs_ui(cx, &mut ui.new_child(UiBuilder::new().max_rect(tabs).id_salt("tabs")));
        let rest = Rect::from_min_max(pos2(area.left(), tabs.bottom()), area.max);
        pane_ui(cx, view, ui, rest, cx.state.panes.focused);
    } else {
        // Shows between the panes.
        ui.painter().rect_filled(area, 0.0, cx.theme.border);
        for (idx, rect) in pane_rects(area, panes.len()).into_iter().enumerate() {
            pane_ui(cx, view, ui, rect, idx);
        }
    }
    ui.advance_cursor_after_rect(area);
}

/// Where `num` panes stand: a row, or two rows of two.
pub fn pane_rects(area: Rect, num: usize) -> Vec<Rect> {
    let gap = 1.0;
    let rows: Vec<usize> = match num {
        0 | 1 => vec![1],
        2 if area.width() >= MIN_TWO_WIDTH => vec![2],
        2 => vec![1, 1],
        3 if area.width() >= MIN_THREE_WIDTH => vec![3],
        3 => vec![2, 1],
        _ => vec![2, 2],
    };
    let height = (area.height() - gap * (rows.len() - 1) as f32) / rows.len() as f32;
    let mut rects = Vec::with_capacity(num);
    for (r, columns) in rows.iter().enumerate() {
        let width = (area.width() - gap * (columns - 1) as f32) / *columns as f32;
        for c in 0..*columns {
            let min = area.min + vec2(c as f32 * (width + gap), r as f32 * (height + gap));
            rects.push(Rect::from_min_size(min, vec2(width, height)));
        }
    }
    rects
}

fn tabs_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    ui.horizontal_centered(|ui| {
        ui.add_space(space::S);
        let width = (ui.available_width() / cx.state.panes.chats.len() as f32 - space::S).max(40.0);
        for (idx, id) in cx.state.panes.chats.clone().into_iter().enumerate() {
            let Some(chat) = cx.state.chat(id) else { continue };
            let text = RichText::new(&chat.title).small().color(cx.theme.text);
            let tab = egui::Button::selectable(idx == cx.state.panes.focused, text).truncate();
            if ui.add_sized([width, 24.0], tab).clicked() {
                cx.send(UiCommand::FocusPane(idx));
            }
        }
    });
}

fn pane_ui(cx: &mut ViewCtx<'_>, view: &mut ChatView, ui: &mut Ui, rect: Rect, idx: usize) {
    let Some(chat) = cx.state.panes.chats.get(idx).and_then(|id| cx.state.chat(*id)) else { return };
    let num_panes = cx.state.panes.chats.len();
    let is_focused = cx.state.panes.focused == idx;
    let mut pane =
        ui.new_child(UiBuilder::new().max_rect(rect).id_salt(("pane", chat.id.0)).layout(Layout::top_down(Align::Min)));
    pane.shrink_clip_rect(rect);
    pane.painter().rect_filled(rect, 0.0, cx.theme.bg_panel);
    let was_pressed = ui.input(|i| i.pointer.any_pressed()) && ui.rect_contains_pointer(rect);
    if was_pressed && !is_focused {
        cx.send(UiCommand::FocusPane(idx));
    }
    header_ui(cx, &mut pane, rect, chat, idx);
    let options = ComposerOptions { is_focused, is_compact: rect.height() < MIN_TALL, has_many_panes: num_panes > 1 };
    let width = (rect.width() - 2.0 * space::L).min(COLUMN);
    let extra = extra_draft_height(&pane, chat, width, options);
    let height = height_of(options) + extra;
    let bottom = Rect::from_min_size(
        pos2(rect.center().x - width / 2.0, rect.bottom() - height - space::S),
        Vec2::new(width, height),
    );
    let body = Rect::from_min_max(pos2(rect.left(), rect.top() + HEADER), pos2(rect.right(), bottom.top() - space::XS));
    let mut middle = pane.new_child(UiBuilder::new().max_rect(body).id_salt("body"));
    middle.shrink_clip_rect(body);
    if chat.path().is_empty() {
        empty_ui(cx, &mut middle, chat);
    } else {
        let transcript = view.transcripts.entry(chat.id).or_default();
        transcript_ui(cx, transcript, &mut middle, chat, is_focused);
    }
    let mut foot = pane.new_child(UiBuilder::new().max_rect(bottom).id_salt("composer"));
    composer_ui(cx, view.composers.entry(chat.id).or_default(), &mut foot, chat, options);
    if is_focused && num_panes > 1 {
        let stroke = Stroke::new(1.0, cx.hue(chat.id));
        ui.painter().rect_stroke(rect, 0.0, stroke, StrokeKind::Inside);
    }
}

/// Room for the lines of a long draft.
fn extra_draft_height(ui: &Ui, chat: &Chat, width: f32, options: ComposerOptions) -> f32 {
    if options.is_compact || chat.draft.is_empty() {
        return 0.0;
    }
    let font = egui::TextStyle::Body.resolve(ui.style());
    let line = ui.text_style_height(&egui::TextStyle::Body);
    let text_width = width - 2.0 * space::M - space::S;
    let galley = ui.painter().layout(chat.draft.clone(), font, ui.visuals().text_color(), text_width);
    (galley.size().y.min(132.0) - line).max(0.0)
}

fn header_ui(cx: &mut ViewCtx<'_>, pane: &mut Ui, rect: Rect, chat: &Chat, idx: usize) {
    let bar = Rect::from_min_size(rect.min, vec2(rect.width(), HEADER));
    pane.painter().hline(bar.x_range(), bar.bottom(), Stroke::new(1.0, cx.theme.border));
    let inner = bar.shrink2(vec2(space::M, 0.0));
    let mut ui =
        pane.new_child(UiBuilder::new().max_rect(inner).id_salt("header").layout(Layout::right_to_left(Align::Center)));
    ui.spacing_mut().item_spacing.x = space::XS;
    if cx.state.panes.chats.len() > 1 && icon_button(&mut ui, Icon::Close, "Close pane (Ctrl+W)").clicked() {
        cx.send(UiCommand::ClosePane(idx));
    }
    if let Some((_, run)) = cx.state.run_of(chat.id) {
        ui.label(small(run_words(run, cx.state.clock.seconds), cx.theme.text_weak));
    }
    ui.with_layout(Layout::left_to_right(Align::Center), |ui| {
        owner_dot(ui, cx.hue(chat.id));
        ui.add(Label::new(RichText::new(&chat.title).color(cx.theme.text_strong)).truncate());
    });
}

const EXAMPLES: [&str; 3] = [
    "Explain to a child why the sky is blue",
    "Write a short poem about a river in winter",
    "What is the difference between TCP and UDP?",
];

/// An empty chat: three ways to begin.
fn empty_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, chat: &Chat) {
    let is_low = ui.available_height() < 220.0;
    let can_send = cx.state.can_send(chat.id);
    ui.vertical_centered(|ui| {
        ui.add_space(if is_low { space::S } else { (ui.available_height() * 0.24).min(160.0) });
        if !is_low {
            ui.label(RichText::new("What would you like to know?").heading().color(cx.theme.text_strong));
            ui.add_space(space::M);
        }
        if !can_send {
            return model_hint_ui(cx, ui);
        }
        let num_shown = ((ui.available_height() / 40.0) as usize).min(EXAMPLES.len());
        for example in &EXAMPLES[..num_shown] {
            let width = (ui.available_width() - 2.0 * space::L).min(360.0);
            let button = egui::Button::new(*example).corner_radius(radius::LARGE).truncate();
            if ui.add_sized([width, 32.0], button).clicked() {
                cx.send(UiCommand::SendText { chat: chat.id, text: (*example).into() });
            }
        }
        if !is_low && cx.state.remote_host.is_none() {
            ui.add_space(space::S);
            ui.label(small("or drop a .gguf file here to load it", cx.theme.text_weak));
        }
    });
}

fn model_hint_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    ui.label(small(super::shell::model_words(cx.state), cx.theme.text_weak));
    let is_loading = matches!(cx.state.engine, crate::engine::handle::EngineStatus::Loading { .. });
    if !is_loading && cx.state.remote_host.is_none() && ui.button("Choose a model").clicked() {
        cx.send(UiCommand::ShowWorkspace(crate::app::state::Workspace::Models));
    }
}

/// True while the empty chat is all there is to see.
pub fn is_blank_view(state: &AppState) -> bool {
    state.panes.chats.len() == 1 && state.focused_chat().is_some_and(|c| c.path().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panes_fill_the_area_without_overlap() {
        for width in [500.0, 916.0, 1400.0] {
            let area = Rect::from_min_size(pos2(10.0, 20.0), vec2(width, 540.0));
            for num in 1..=4 {
                let rects = pane_rects(area, num);
                assert_eq!(rects.len(), num);
                for (i, a) in rects.iter().enumerate() {
                    assert!(area.expand(0.01).contains_rect(*a));
                    assert!(rects[..i].iter().all(|b| !a.shrink(0.1).intersects(*b)), "{num} panes at {width}");
                }
            }
        }
    }
}
