//! The first run: is there a GPU, where does a model come from. Every state has a way on.

use super::{ViewCtx, primary_button, small};
use crate::app::command::UiCommand;
use crate::app::format;
use crate::app::state::{AppState, Workspace};
use crate::app::theme::{radius, space};
use crate::engine::handle::EngineStatus;
use egui::{Frame, Margin, ProgressBar, RichText, ScrollArea, Stroke, Ui};

const CARD_WIDTH: f32 = 460.0;

/// True while there is no model and nothing to read: no chat was begun.
pub fn is_due(state: &AppState) -> bool {
    state.model().is_none() && super::chat::is_blank_view(state)
}

pub fn welcome_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    ScrollArea::vertical().id_salt("welcome").auto_shrink([false, false]).show(ui, |ui| {
        ui.vertical_centered(|ui| {
            ui.add_space((ui.available_height() * 0.12).clamp(space::L, 96.0));
            ui.label(
                RichText::new("Welcome to Kvasir")
                    .size(crate::app::theme::font_size::TITLE)
                    .color(cx.theme.text_strong),
            );
            ui.add_space(space::XS);
            ui.label(small("Language models on your own GPU, with the engine in view", cx.theme.text_weak));
            ui.add_space(space::L);
            let width = (ui.available_width() - 2.0 * space::L).min(CARD_WIDTH);
            ui.allocate_ui(egui::vec2(width, 0.0), |ui| {
                ui.set_width(width);
                ui.with_layout(egui::Layout::top_down(egui::Align::Min), |ui| match &cx.state.engine {
                    EngineStatus::Loading { phase, done, total } => loading_ui(cx, ui, phase, *done, *total),
                    EngineStatus::Failed { message, fix, .. } => {
                        failed_ui(cx, ui, message, fix.as_deref());
                        if cx.state.remote_host.is_none() {
                            offers_ui(cx, ui);
                        }
                    }
                    EngineStatus::NoModel | EngineStatus::Ready(_) => offers_ui(cx, ui),
                });
            });
        });
    });
}

fn card(cx: &ViewCtx<'_>) -> Frame {
    Frame::new()
        .fill(cx.theme.bg_raised)
        .stroke(Stroke::new(1.0, cx.theme.border))
        .corner_radius(radius::LARGE)
        .inner_margin(Margin::same(space::L as i8))
}

fn loading_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, phase: &str, done: u64, total: u64) {
    card(cx).show(ui, |ui| {
        ui.set_width(ui.available_width());
        if let Some(host) = &cx.state.remote_host {
            ui.label(RichText::new(format!("Waiting for the engine at {host}")).color(cx.theme.text_strong));
            ui.label(small(phase, cx.theme.text));
            return;
        }
        ui.label(RichText::new("Getting the model ready").color(cx.theme.text_strong));
        progress_ui(cx, ui, phase, done, total);
        ui.add_space(space::S);
        if ui.button("Cancel").clicked() {
            cx.send(UiCommand::CancelLoad);
        }
    });
}

/// A named phase with its share done; also used by the list of models.
pub fn progress_ui(cx: &ViewCtx<'_>, ui: &mut Ui, phase: &str, done: u64, total: u64) {
    ui.add_space(space::XS);
    let share = if total > 0 { (done as f64 / total as f64) as f32 } else { 0.0 };
    ui.add(ProgressBar::new(share).desired_height(6.0).fill(cx.theme.accent));
    ui.horizontal_wrapped(|ui| {
        ui.label(small(phase, cx.theme.text));
        // One of one is a phase without parts.
        if total > 1 {
            let text = match total >= 1 << 20 {
                true => format!("{} of {}", format::decimal_bytes(done), format::decimal_bytes(total)),
                false => format!("{} of {}", format::count(done), format::count(total)),
            };
            ui.label(small(text, cx.theme.text_weak));
        }
    });
}

fn failed_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, message: &str, fix: Option<&str>) {
    Frame::new()
        .fill(cx.theme.bg_raised)
        .stroke(Stroke::new(1.0, cx.theme.error))
        .corner_radius(radius::LARGE)
        .inner_margin(Margin::same(space::L as i8))
        .show(ui, |ui| {
            ui.set_width(ui.available_width());
            ui.label(RichText::new("That did not work").color(cx.theme.text_strong));
            ui.label(message);
            if let Some(fix) = fix {
                ui.add_space(space::XS);
                ui.label(small("What helps", cx.theme.text_weak));
                ui.label(fix);
            }
            ui.add_space(space::S);
            if ui.button("Copy details").clicked() {
                cx.send(UiCommand::Copy(format!("{message}\n{}", fix.unwrap_or_default())));
            }
        });
    ui.add_space(space::M);
}

/// What the model will run on, as far as is known before one is loaded.
fn adapter_ui(cx: &ViewCtx<'_>, ui: &mut Ui) {
    let adapter = &cx.state.window_adapter;
    if adapter.name.is_empty() {
        return;
    }
    let name = super::shell::short_adapter_name(&adapter.name);
    let (color, text, note) = match adapter.is_cpu {
        false => (cx.theme.success, format!("Your GPU: {name}"), None),
        true => {
            let note = "No GPU was found: models run on the CPU, through software Vulkan";
            (cx.theme.warn, format!("Your adapter: {name}"), Some(note))
        }
    };
    card(cx).show(ui, |ui| {
        ui.set_width(ui.available_width());
        ui.horizontal(|ui| {
            super::owner_dot(ui, color);
            ui.label(RichText::new(text).color(cx.theme.text_strong));
        });
        if let Some(note) = note {
            ui.label(small(note, cx.theme.text_weak));
        }
    });
    ui.add_space(space::M);
}

fn offers_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    adapter_ui(cx, ui);
    card(cx).show(ui, |ui| {
        ui.set_width(ui.available_width());
        ui.label(RichText::new("Choose a model").color(cx.theme.text_strong));
        ui.add_space(space::XS);
        let offer = &cx.state.default_model;
        ui.label(format!("{} is small and quick: {}.", offer.name, offer.cost_words()));
        ui.add_space(space::S);
        let verb = if offer.is_here { "Load" } else { "Get" };
        if primary_button(ui, &cx.theme, &format!("{verb} {}", offer.name)).clicked() {
            cx.send(UiCommand::LoadDefaultModel);
        }
        ui.add_space(space::M);
        ui.separator();
        ui.add_space(space::XS);
        ui.horizontal_wrapped(|ui| {
            ui.label(small("Or your own:", cx.theme.text_weak));
            if ui.button("Open a file…").clicked() {
                cx.send(UiCommand::PickModelFile);
            }
            if ui.button("Find models here").clicked() {
                cx.send(UiCommand::ShowWorkspace(Workspace::Models));
            }
        });
        ui.label(small("or drop a .gguf file on this window", cx.theme.text_weak));
        if let Some(error) = &cx.state.models.error {
            ui.colored_label(cx.theme.error, error);
        }
    });
}
