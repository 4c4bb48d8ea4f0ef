//! Cached prefixes: what they begin with, where they are kept, what they were worth, and what can be done with them.

use super::paint::{Quads, describe, owner_dot, quiet_button, small, title_text};
use crate::app::inspect::model::{InspectCommand, InspectModel, PrefixCommand, Selection};
use crate::app::inspect::queue_words::{HitSplit, prefix_facts, tier_words};
use crate::app::theme::{Theme, radius, space};
use crate::telemetry::PrefixInfo;
use egui::{
    Align, Color32, CornerRadius, Frame, Key, Label, Layout, Margin, Popup, Rect, RichText, ScrollArea, Sense,
    TextEdit, Ui, pos2, vec2,
};

/// What the list keeps from frame to frame.
#[derive(Default)]
pub struct PrefixesView {
    /// The prefix whose name is being typed.
    renaming: Option<(u64, String)>,
    /// "Reset cache" was pressed once: the second press does it.
    is_reset_asked: bool,
}

/// How prompts were found, then every prefix that the cache knows of.
pub fn prefixes_ui(
    ui: &mut Ui,
    view: &mut PrefixesView,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    split_ui(ui, model, theme);
    head_ui(ui, view, model, theme, commands);
    let prefixes = &model.snapshot().prefixes;
    if prefixes.is_empty() {
        let text = "No prefix is pinned or was shared yet. When requests begin with the same tokens, what they share \
                    stands here. A chat's menu can pin its system prompt.";
        ui.add(Label::new(small(text, theme.text_weak)).wrap());
        return;
    }
    ScrollArea::vertical().id_salt("prefixes").auto_shrink(false).show(ui, |ui| {
        ui.spacing_mut().item_spacing.y = space::XS;
        for prefix in prefixes {
            prefix_ui(ui, view, model, theme, prefix, commands);
        }
    });
}

/// Where prompt tokens came from, as one bar and in words.
fn split_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme) {
    let split = HitSplit::of(&model.kv_now());
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), 10.0), Sense::hover());
    ui.painter().rect_filled(rect, CornerRadius::same(radius::SMALL), theme.bg_active);
    let mut quads = Quads::default();
    let mut x = rect.left();
    for ((_, n), color) in split.parts().into_iter().zip(part_colors(theme)) {
        let width = rect.width() * n as f32 / split.total().max(1) as f32;
        quads.rect(Rect::from_min_max(pos2(x, rect.top()), pos2(x + width, rect.bottom())), color);
        x += width;
    }
    quads.paint(ui.painter());
    describe(&response, &split.words());
    response.on_hover_text(split.words());
    ui.horizontal_wrapped(|ui| {
        ui.spacing_mut().item_spacing = vec2(space::XS, 0.0);
        for ((name, n), color) in split.parts().into_iter().zip(part_colors(theme)) {
            if n == 0 {
                continue;
            }
            owner_dot(ui, color);
            let share = crate::app::format::percent(n, split.total());
            ui.label(small(format!("{name} {share}"), theme.text_weak));
            ui.add_space(space::XS);
        }
        if split.total() == 0 {
            ui.label(small(split.words(), theme.text_weak));
        }
    });
}

fn part_colors(theme: &Theme) -> [Color32; 5] {
    [theme.success, theme.accent, theme.warn, theme.text_weak, theme.bg_active]
}

fn head_ui(
    ui: &mut Ui,
    view: &mut PrefixesView,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    ui.horizontal(|ui| {
        ui.label(title_text(theme, "Prefixes"));
        if !model.is_live() {
            ui.label(small("as of now", theme.text_weak));
        }
        ui.with_layout(Layout::right_to_left(Align::Center), |ui| {
            ui.spacing_mut().item_spacing.x = space::XS;
            if view.is_reset_asked {
                if quiet_button(ui, "Keep", "Leave the cache as it is").clicked() {
                    view.is_reset_asked = false;
                }
                if quiet_button(ui, "Really reset", "Every prefix that is not pinned is dropped").clicked() {
                    view.is_reset_asked = false;
                    commands.push(InspectCommand::Prefix(PrefixCommand::Reset));
                }
            } else if quiet_button(ui, "Reset cache", "Drop every prefix that is not pinned").clicked() {
                view.is_reset_asked = true;
            }
        });
    });
}

/// One prefix: its name or beginning, its facts, and its menu. A click shows its last block in the map.
fn prefix_ui(
    ui: &mut Ui,
    view: &mut PrefixesView,
    model: &InspectModel,
    theme: &Theme,
    prefix: &PrefixInfo,
    commands: &mut Vec<InspectCommand>,
) {
    let step = model.snapshot().step;
    Frame::new()
        .fill(theme.bg_sunken)
        .corner_radius(CornerRadius::same(radius::MEDIUM))
        .inner_margin(Margin::symmetric(space::S as i8, space::XS as i8))
        .show(ui, |ui| {
            ui.set_width(ui.available_width());
            ui.spacing_mut().item_spacing.y = 2.0;
            if view.renaming.as_ref().is_some_and(|(id, _)| *id == prefix.id) {
                rename_ui(ui, view, commands);
            } else {
                ui.horizontal(|ui| {
                    ui.with_layout(Layout::right_to_left(Align::Center), |ui| {
                        menu_ui(ui, view, model, prefix, commands);
                        if prefix.pinned {
                            ui.label(small("pinned", theme.accent)).on_hover_text("It is never evicted");
                        }
                        ui.with_layout(Layout::left_to_right(Align::Center), |ui| {
                            name_ui(ui, model, theme, prefix, commands);
                        });
                    });
                });
            }
            let facts = ui.add(Label::new(small(prefix_facts(prefix, step), theme.text_weak)).wrap());
            let mut hint = tier_words(prefix.tier).1.to_owned();
            if prefix.cache_salt != 0 {
                hint += ". Only requests of the same salt share it";
            }
            if prefix.adapter != 0 {
                hint += &format!(". For adapter {}", prefix.adapter);
            }
            facts.on_hover_text(hint);
        });
}

fn name_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, prefix: &PrefixInfo, commands: &mut Vec<InspectCommand>) {
    let preview = model.preview(prefix);
    let (text, ink) = match &prefix.name {
        Some(name) => (name.clone(), theme.text_strong),
        None => (format!("“{preview}…”"), theme.text),
    };
    let label = Label::new(RichText::new(text).color(ink)).truncate().selectable(false).sense(Sense::click());
    if ui.add(label).on_hover_text(format!("Begins with “{preview}…”. Click to show its last block")).clicked()
        && let Some(block) = model.map().and_then(|map| map.block_of_hash(prefix.id))
    {
        commands.push(InspectCommand::Select(Selection::Block(block)));
    }
}

fn menu_ui(
    ui: &mut Ui,
    view: &mut PrefixesView,
    model: &InspectModel,
    prefix: &PrefixInfo,
    commands: &mut Vec<InspectCommand>,
) {
    let hint = match &prefix.name {
        Some(name) => format!("Actions of {name}"),
        None => format!("Actions of the prefix “{}…”", model.preview(prefix)),
    };
    let button = quiet_button(ui, "…", &hint);
    Popup::menu(&button).show(|ui| {
        let id = prefix.id;
        let name = prefix.name.clone().unwrap_or_default();
        if prefix.pinned {
            if ui.button("Unpin").clicked() {
                commands.push(InspectCommand::Prefix(PrefixCommand::Unpin { id }));
            }
            if ui.button("Rename").clicked() {
                view.renaming = Some((id, name));
            }
        } else {
            if ui.button("Pin").clicked() {
                commands.push(InspectCommand::Prefix(PrefixCommand::Pin { id, name: name.clone() }));
            }
            if ui.button("Pin with a name…").clicked() {
                view.renaming = Some((id, name));
            }
            if ui.button("Evict").clicked() {
                commands.push(InspectCommand::Prefix(PrefixCommand::Evict { id }));
            }
        }
    });
}

/// Enter or leaving the field pins under the name typed; Escape leaves things as they are.
fn rename_ui(ui: &mut Ui, view: &mut PrefixesView, commands: &mut Vec<InspectCommand>) {
    let Some((id, name)) = &mut view.renaming else { return };
    let field = TextEdit::singleline(name).hint_text("Name of the prefix").desired_width(f32::INFINITY);
    let response = ui.add(field);
    if response.lost_focus() {
        if !ui.input(|i| i.key_pressed(Key::Escape)) {
            let name = name.trim().to_owned();
            commands.push(InspectCommand::Prefix(PrefixCommand::Pin { id: *id, name }));
        }
        view.renaming = None;
    } else if !response.has_focus() {
        response.request_focus();
    }
}
