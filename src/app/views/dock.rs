//! The dock's "Run settings" tab: what the focused chat asks of the engine.

use super::{ViewCtx, small};
use crate::app::chat::RunSettings;
use crate::app::command::UiCommand;
use crate::app::prompt::context_limit;
use crate::app::theme::space;
use egui::{DragValue, Grid, ScrollArea, Slider, TextEdit, Ui};

/// Without a model, max tokens may be anything up to this.
const MAX_TOKENS_UNKNOWN: u32 = 131_072;

pub fn run_settings_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let Some(chat) = cx.state.focused_chat() else { return };
    let mut settings = chat.settings.clone();
    ScrollArea::vertical().id_salt("run_settings").auto_shrink([false, false]).show(ui, |ui| {
        ui.label(small(format!("For “{}”", chat.title), cx.theme.text_weak));
        ui.add_space(space::S);
        prompt_ui(cx, ui, &mut settings);
        ui.add_space(space::M);
        let max_tokens = cx.state.model().map_or(MAX_TOKENS_UNKNOWN, |m| context_limit(m).max(1));
        numbers_ui(ui, &mut settings, max_tokens);
        ui.add_space(space::M);
        if ui.button("Reset to balanced").clicked() {
            settings = RunSettings { system_prompt: settings.system_prompt.clone(), ..RunSettings::balanced() };
        }
    });
    if settings != chat.settings {
        cx.send(UiCommand::SetSettings { chat: chat.id, settings: Box::new(settings) });
    }
}

fn prompt_ui(cx: &ViewCtx<'_>, ui: &mut Ui, settings: &mut RunSettings) {
    let label = ui.label("System prompt");
    let field =
        TextEdit::multiline(&mut settings.system_prompt).hint_text("None").desired_rows(4).desired_width(f32::INFINITY);
    ScrollArea::vertical().id_salt("system_prompt").max_height(150.0).show(ui, |ui| {
        ui.add(field).labelled_by(label.id);
    });
    ui.label(small("Chats with the same system prompt share its KV blocks", cx.theme.text_weak));
}

fn numbers_ui(ui: &mut Ui, settings: &mut RunSettings, max_tokens_limit: u32) {
    ui.spacing_mut().slider_width = (ui.available_width() - 170.0).clamp(60.0, 180.0);
    Grid::new("sampling").num_columns(2).spacing([space::M, space::S]).show(ui, |ui| {
        let row = |ui: &mut Ui, name: &str, help: &str, add: &mut dyn FnMut(&mut Ui) -> egui::Response| {
            let label = ui.label(name).on_hover_text(help);
            add(ui).labelled_by(label.id).on_hover_text(help);
            ui.end_row();
        };
        row(ui, "Temperature", "0 always takes the most likely token", &mut |ui| {
            ui.add(Slider::new(&mut settings.temperature, 0.0..=2.0).step_by(0.05).fixed_decimals(2))
        });
        row(ui, "Top-p", "Keeps the likeliest tokens up to this sum of probabilities; 1 keeps all", &mut |ui| {
            ui.add(Slider::new(&mut settings.top_p, 0.05..=1.0).step_by(0.01).fixed_decimals(2))
        });
        row(ui, "Min-p", "Drops tokens less likely than this share of the likeliest; 0 keeps all", &mut |ui| {
            ui.add(Slider::new(&mut settings.min_p, 0.0..=1.0).step_by(0.01).fixed_decimals(2))
        });
        row(ui, "Top-k", "Keeps the k likeliest tokens; 0 keeps all", &mut |ui| {
            ui.add(DragValue::new(&mut settings.top_k).range(0..=1000))
        });
        row(ui, "Max tokens", "Longest answer", &mut |ui| {
            ui.add(DragValue::new(&mut settings.max_tokens).range(1..=max_tokens_limit).speed(8.0))
        });
        seed_ui(ui, settings);
    });
}

fn seed_ui(ui: &mut Ui, settings: &mut RunSettings) {
    let label = ui.label("Seed").on_hover_text("The same seed gives the same answer to the same prompt");
    ui.horizontal(|ui| {
        let mut is_fixed = settings.seed.is_some();
        if ui.checkbox(&mut is_fixed, "Fixed").changed() {
            settings.seed = is_fixed.then_some(42);
        }
        if let Some(seed) = &mut settings.seed {
            ui.add(DragValue::new(seed).speed(1.0)).labelled_by(label.id);
        }
    });
    ui.end_row();
}
