//! The Models workspace: what is on this computer, what is loaded, how to open more.

use super::welcome::progress_ui;
use super::{ViewCtx, primary_button, quiet_button, right_to_left, small};
use crate::app::actions::models::{KV_DTYPES, PREEMPTION_MODES, QUEUE_POLICIES, VICTIM_POLICIES};
use crate::app::command::UiCommand;
use crate::app::format;
use crate::app::inspect::queue_words::{policy_words, victim_words};
use crate::app::state::ModelEntry;
use crate::app::theme::{radius, space};
use crate::app::words;
use crate::engine::handle::EngineStatus;
use crate::engine::options::{EngineOptions, KvCacheDtype, PreemptionMode};
use egui::{Align, Frame, Label, Layout, Margin, RichText, ScrollArea, Stroke, Ui, Vec2};

const ROW_HEIGHT: f32 = 56.0;
/// Two settings of the engine stand in a row from this width on.
const TWO_CHOICES_WIDTH: f32 = 760.0;

pub fn models_workspace_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    Frame::new().inner_margin(Margin::same(space::L as i8)).show(ui, |ui| {
        head_ui(cx, ui);
        engine_ui(cx, ui);
        choices_ui(cx, ui);
        if let Some(error) = &cx.state.models.error {
            ui.add(Label::new(RichText::new(error).color(cx.theme.error)).wrap());
        }
        list_ui(cx, ui);
    });
}

fn head_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    ui.horizontal(|ui| {
        ui.label(RichText::new("Models on this computer").heading().color(cx.theme.text_strong));
        right_to_left(ui, |ui| {
            if ui.button("Open a file…").clicked() {
                cx.send(UiCommand::PickModelFile);
            }
            let text = if cx.state.models.is_scanning { "Looking…" } else { "Look again" };
            if ui.add_enabled(!cx.state.models.is_scanning, egui::Button::new(text)).clicked() {
                cx.send(UiCommand::ScanModels);
            }
        });
    });
    ui.add_space(space::S);
}

/// What is loaded, loading, or failed to load.
fn engine_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let frame = cx.theme.card_frame().inner_margin(Margin::same(space::M as i8));
    match &cx.state.engine {
        EngineStatus::NoModel => {}
        EngineStatus::Loading { phase, done, total } => {
            frame.show(ui, |ui| {
                ui.set_width(ui.available_width());
                progress_ui(cx, ui, phase, *done, *total);
                if cx.state.remote_host.is_none() && ui.button("Cancel").clicked() {
                    cx.commands.push(UiCommand::CancelLoad);
                }
            });
        }
        EngineStatus::Ready(model) => {
            frame.show(ui, |ui| {
                ui.set_width(ui.available_width());
                ui.horizontal(|ui| {
                    ui.label(RichText::new(words::model_name(model)).color(cx.theme.text_strong));
                    ui.label(small(super::shell::model_facts(model), cx.theme.text_weak));
                    right_to_left(ui, |ui| {
                        if cx.state.remote_host.is_none() && ui.button("Unload").clicked() {
                            cx.commands.push(UiCommand::Unload);
                        }
                    });
                });
            });
        }
        EngineStatus::Failed { message, fix, .. } => {
            frame.stroke(Stroke::new(1.0, cx.theme.error)).show(ui, |ui| {
                ui.set_width(ui.available_width());
                ui.add(Label::new(RichText::new(message).color(cx.theme.error)).wrap());
                if let Some(fix) = fix {
                    ui.add(Label::new(fix).wrap());
                }
            });
        }
    }
    ui.add_space(space::S);
}

/// Who is admitted first, who gives way and how, and what keys and values are stored as: options of the next load.
fn choices_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let before = cx.state.choices;
    let mut choices = before;
    let chosen = before.apply(cx.state.started_with.clone());
    let is_wide = ui.available_width() >= TWO_CHOICES_WIDTH;
    ui.label(RichText::new("Engine settings").color(cx.theme.text_strong));
    egui::Grid::new("engine_choices").num_columns(4).min_row_height(28.0).show(ui, |ui| {
        let queue = QUEUE_POLICIES.map(|(_, p)| (p, policy_words(p)));
        pick_ui(ui, "Queue", chosen.scheduling_policy, &queue, |p| choices.queue = Some(p));
        if !is_wide {
            ui.end_row();
        }
        let dtypes = KV_DTYPES.map(|(_, p)| (p, kv_dtype_words(p)));
        pick_ui(ui, "Keys and values", chosen.kv_cache_dtype, &dtypes, |p| choices.kv_cache_dtype = Some(p));
        ui.end_row();
        let victims = VICTIM_POLICIES.map(|(_, p)| (p, victim_words(p)));
        pick_ui(ui, "When blocks are short, gives way", chosen.victim_policy, &victims, |p| choices.victim = Some(p));
        if !is_wide {
            ui.end_row();
        }
        let modes = PREEMPTION_MODES.map(|(_, p)| (p, preemption_words(p)));
        pick_ui(ui, "and comes back by", chosen.preemption, &modes, |p| choices.preemption = Some(p));
        ui.end_row();
    });
    ui.horizontal(|ui| {
        let of = |o: &EngineOptions| (o.scheduling_policy, o.victim_policy, o.preemption, o.kv_cache_dtype);
        let is_new = of(&cx.state.loaded_with) != of(&chosen);
        if is_new && cx.state.model().is_some() {
            ui.label(small("used from the next load on", cx.theme.text_weak));
            let hint = "Answers under way end; chats stay";
            if ui.button("Load again").on_hover_text(hint).clicked() {
                cx.commands.push(UiCommand::Reload);
            }
        }
    });
    ui.add_space(space::S);
    if choices != before {
        cx.send(UiCommand::SetEngineChoices(choices));
    }
}

/// How a preempted request gets its keys and values back: its name and what it means.
fn preemption_words(mode: PreemptionMode) -> (&'static str, &'static str) {
    match mode {
        PreemptionMode::Auto => ("whatever is cheaper", "By the measured cost of computing and of copying"),
        PreemptionMode::Recompute => ("computing again", "Its keys and values are computed again from its tokens"),
        PreemptionMode::Swap => ("host memory", "Its blocks are copied to host memory and back, where there is room"),
    }
}

fn kv_dtype_words(dtype: KvCacheDtype) -> (&'static str, &'static str) {
    match dtype {
        KvCacheDtype::Auto => ("auto", "f16, and f32 in the reference mode"),
        KvCacheDtype::F16 => ("f16", "Two bytes a value"),
        KvCacheDtype::F32 => ("f32", "Four bytes a value: twice the memory of f16"),
        KvCacheDtype::Int8 => ("int8", "About half the memory of f16, with a little more error"),
    }
}

fn pick_ui<T: Copy + PartialEq>(ui: &mut Ui, name: &str, value: T, all: &[(T, (&str, &str))], mut set: impl FnMut(T)) {
    let label = ui.label(name);
    let text = all.iter().find(|(p, _)| *p == value).map_or("", |(_, words)| words.0);
    let response = egui::ComboBox::from_id_salt(name).width(170.0).selected_text(text).show_ui(ui, |ui| {
        for (policy, (text, meaning)) in all {
            if ui.selectable_label(*policy == value, *text).on_hover_text(*meaning).clicked() {
                set(*policy);
            }
        }
    });
    response.response.labelled_by(label.id);
}

fn list_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let models = &cx.state.models;
    offer_ui(cx, ui);
    if models.entries.is_empty() {
        ui.add_space(space::M);
        if models.is_scanning || !models.has_scanned {
            ui.label(small("Looking for models…", cx.theme.text_weak));
        } else {
            let text = format!("Nothing found in {}", format::counted(models.folders.len() as u64, "folder"));
            ui.label(small(text, cx.theme.text_weak));
            for folder in &models.folders {
                ui.label(RichText::new(folder.display().to_string()).small().monospace().color(cx.theme.text_faint));
            }
        }
        return;
    }
    let num = models.entries.len();
    ScrollArea::vertical().id_salt("models").auto_shrink([false, false]).show_rows(ui, ROW_HEIGHT, num, |ui, range| {
        for idx in range {
            let entry = &cx.state.models.entries[idx];
            row_ui(cx, ui, entry);
        }
    });
}

/// The built-in default model, always on offer.
fn offer_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let offer = &cx.state.default_model;
    let is_loaded = cx.state.model().is_some_and(|m| words::model_name(m) == offer.name);
    if is_loaded || matches!(cx.state.engine, EngineStatus::Loading { .. }) {
        return;
    }
    let text = format!("{}, the built-in default: {}", offer.name, offer.cost_words());
    ui.horizontal(|ui| {
        right_to_left(ui, |ui| {
            if primary_button(ui, &cx.theme, "Load").clicked() {
                cx.commands.push(UiCommand::LoadDefaultModel);
            }
            ui.with_layout(Layout::left_to_right(Align::Center), |ui| ui.add(Label::new(text).truncate()));
        });
    });
    ui.separator();
}

fn row_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, entry: &ModelEntry) {
    let is_loaded = cx.state.model().is_some_and(|m| m.path.as_deref() == Some(entry.path.as_path()));
    let fill = if is_loaded { cx.theme.accent_bg } else { egui::Color32::TRANSPARENT };
    Frame::new().fill(fill).corner_radius(radius::MEDIUM).inner_margin(Margin::symmetric(space::S as i8, 6)).show(
        ui,
        |ui| {
            ui.set_min_size(Vec2::new(ui.available_width(), ROW_HEIGHT - 12.0));
            ui.with_layout(Layout::right_to_left(Align::Center), |ui| {
                if entry.problem.is_none() {
                    let clicked = match is_loaded {
                        true => ui.button("Unload").clicked().then_some(UiCommand::Unload),
                        false => ui.button("Load").clicked().then(|| UiCommand::LoadModel(entry.path.clone())),
                    };
                    cx.commands.extend(clicked);
                }
                if quiet_button(ui, "Copy path").clicked() {
                    cx.commands.push(UiCommand::Copy(entry.path.display().to_string()));
                }
                ui.with_layout(Layout::top_down(Align::Min), |ui| {
                    let color = if entry.problem.is_some() { cx.theme.text_weak } else { cx.theme.text_strong };
                    ui.add(Label::new(RichText::new(&entry.name).color(color)).truncate());
                    match &entry.problem {
                        Some(problem) => ui.add(Label::new(small(problem, cx.theme.warn)).truncate()),
                        None => ui.add(Label::new(small(facts_of(entry), cx.theme.text_weak)).truncate()),
                    };
                });
            });
        },
    );
}

fn facts_of(entry: &ModelEntry) -> String {
    let mut parts = Vec::new();
    if entry.params > 0 {
        parts.push(params_words(entry.params));
    }
    for text in [&entry.quant, &entry.arch] {
        if !text.is_empty() {
            parts.push(text.clone());
        }
    }
    parts.push(format::decimal_bytes(entry.bytes));
    if entry.context > 0 {
        parts.push(format!("{} context", format::count(entry.context.into())));
    }
    parts.push(entry.origin.clone());
    parts.join(" · ")
}

/// `134_515_008` as `135M`.
pub fn params_words(params: u64) -> String {
    match params {
        0..1_000_000 => format::count(params),
        1_000_000..1_000_000_000 => format!("{}M", (params + 500_000) / 1_000_000),
        _ => format!("{:.1}B", params as f64 / 1e9),
    }
}
