//! Forked requests as trees: who came from whom, what their blocks share, what that saves.

use super::paint::{Quads, small, small_font, text_clipped};
use crate::app::format;
use crate::app::inspect::forks::{Family, ForkNode, families};
use crate::app::inspect::model::{InspectCommand, InspectModel, Selection};
use crate::app::inspect::words;
use crate::app::theme::{Theme, mix, radius, space};
use egui::{Align2, CornerRadius, Rect, ScrollArea, Sense, Stroke, Ui, pos2, vec2};

const ROW: f32 = 24.0;
const INDENT: f32 = 16.0;
const BAR: f32 = 56.0;

/// What the trees keep from frame to frame.
#[derive(Default)]
pub struct ForksView {
    families: Vec<Family>,
    revision: Option<u64>,
}

/// All trees, one below the other.
pub fn forks_ui(
    ui: &mut Ui,
    view: &mut ForksView,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    if view.revision != Some(model.revision()) {
        view.revision = Some(model.revision());
        view.families = families(model);
    }
    if view.families.is_empty() {
        let text = "No request was forked up to this step. Several choices of one request, beams of a search and \
                    branches of a chat stand here as trees, with the blocks that they share.";
        ui.add(egui::Label::new(small(text, theme.text_weak)).wrap());
        return;
    }
    ScrollArea::vertical().id_salt("forks").auto_shrink(false).show(ui, |ui| {
        // Room for the scroll bar.
        ui.set_max_width(ui.available_width() - space::S);
        ui.spacing_mut().item_spacing.y = 0.0;
        for family in &view.families {
            ui.add(egui::Label::new(small(family_words(model, family), theme.text_weak)).wrap());
            ui.add_space(2.0);
            let mut lines = Vec::new();
            for node in &family.nodes {
                node_ui(ui, model, theme, node, &mut lines, commands);
            }
            ui.add_space(space::M);
        }
    });
}

/// "3 sequences hold 22 blocks; sharing saves 14 blocks = 7 MiB".
fn family_words(model: &InspectModel, family: &Family) -> String {
    let members = format::counted(family.nodes.len() as u64, "sequence");
    if !family.is_alive() {
        return format!("{members}, all ended");
    }
    let mut out = format!("{members} hold {}", format::counted(family.num_blocks.into(), "block"));
    if family.num_saved > 0 {
        let saved = u64::from(family.num_saved);
        out += &format!("; sharing saves {}", format::counted(saved, "block"));
        let bytes = saved * model.snapshot().kv_bytes_per_block;
        if bytes > 0 {
            out += &format!(" = {}", format::bytes(bytes));
        }
    }
    out
}

/// The node in a sentence, for a screen reader and the pointer.
fn node_words(node: &ForkNode) -> String {
    let what = if node.depth == 0 { node.label.clone() } else { format!("{}, {}", node.label, node.kind()) };
    let blocks = match (node.shared, node.own) {
        (0, 0) => "holds no blocks".to_owned(),
        (shared, own) => format!("{} shared, {own} of its own", format::counted(shared.into(), "block")),
    };
    let state = node.state.as_ref().map_or("not known at this step".to_owned(), words::state_words);
    format!("{what} · request {} · {blocks} · {state}", node.id)
}

/// `lines` holds, by depth, whether the line of that depth goes on below.
fn node_ui(
    ui: &mut Ui,
    model: &InspectModel,
    theme: &Theme,
    node: &ForkNode,
    lines: &mut Vec<bool>,
    commands: &mut Vec<InspectCommand>,
) {
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), ROW), Sense::click());
    let is_selected = model.selection() == Some(Selection::Request(node.id));
    let words = node_words(node);
    response.widget_info(|| egui::WidgetInfo::selected(egui::Role::Button, true, is_selected, &words));
    let fill = match (is_selected, response.hovered() || response.has_focus()) {
        (true, _) => Some(theme.accent_bg),
        (false, true) => Some(theme.bg_hover),
        (false, false) => None,
    };
    if let Some(fill) = fill {
        ui.painter().rect_filled(rect, CornerRadius::same(radius::SMALL), fill);
    }
    connectors(ui, theme, node, lines, rect);
    let depth = node.depth as f32;
    let color = theme.owner_color(model.hue_of(node.id));
    let dot = pos2(rect.left() + 8.0 + depth * INDENT, rect.center().y);
    ui.painter().circle_filled(dot, 4.0, color);
    let is_over = node.shared + node.own == 0;
    let count = if is_over {
        node.state.as_ref().map_or(String::new(), words::state_words)
    } else {
        format!("{} shared, {} own", node.shared, node.own)
    };
    let ink = if is_over { theme.text_weak } else { theme.text };
    let right = rect.right() - space::XS - if is_over { 0.0 } else { BAR + space::S };
    let count = ui.painter().text(pos2(right, dot.y), Align2::RIGHT_CENTER, count, small_font(), theme.text_weak);
    let width = count.left() - dot.x - 18.0;
    text_clipped(ui.painter(), pos2(dot.x + 10.0, dot.y), Align2::LEFT_CENTER, &node.kind(), width, ink);
    if !is_over {
        let bar = Rect::from_min_max(pos2(right + space::S, dot.y - 4.0), pos2(rect.right() - space::XS, dot.y + 4.0));
        share_bar(ui, theme, node, bar, color);
    }
    if response.on_hover_text(words).clicked() {
        commands.push(if is_selected {
            InspectCommand::ClearSelection
        } else {
            InspectCommand::Select(Selection::Request(node.id))
        });
    }
}

/// The shared part pale, the own part in full.
fn share_bar(ui: &Ui, theme: &Theme, node: &ForkNode, bar: Rect, color: egui::Color32) {
    let total = (node.shared + node.own) as f32;
    let split = bar.left() + bar.width() * node.shared as f32 / total;
    let mut quads = Quads::default();
    quads.rect(Rect::from_min_max(bar.min, pos2(split, bar.bottom())), mix(theme.bg_sunken, color, 0.45));
    quads.rect(Rect::from_min_max(pos2(split, bar.top()), bar.max), color);
    quads.paint(ui.painter());
}

fn connectors(ui: &Ui, theme: &Theme, node: &ForkNode, lines: &mut Vec<bool>, rect: Rect) {
    let depth = node.depth as usize;
    lines.resize(depth + 1, false);
    lines[depth] = !node.is_last;
    let stroke = Stroke::new(1.0, theme.border_strong);
    let x_of = |depth: usize| (rect.left() + 8.0 + depth as f32 * INDENT).round() + 0.5;
    // Lines of relatives further down run through.
    for (level, _) in lines[..depth].iter().enumerate().skip(1).filter(|(_, goes_on)| **goes_on) {
        ui.painter().vline(x_of(level - 1), rect.y_range(), stroke);
    }
    if depth > 0 {
        let x = x_of(depth - 1);
        let bottom = if node.is_last { rect.center().y } else { rect.bottom() };
        ui.painter().vline(x, rect.top()..=bottom, stroke);
        ui.painter().hline(x..=x_of(depth) - 5.0, rect.center().y.round() + 0.5, stroke);
    }
}
