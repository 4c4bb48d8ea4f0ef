//! The figures on top: how the engine does at the step shown, and whether that is now.

use super::paint::{quiet_button, small};
use crate::app::format;
use crate::app::inspect::kpi::Kpis;
use crate::app::inspect::model::{Cursor, InspectCommand, InspectModel};
use crate::app::theme::{Theme, font_size, space};
use egui::{Align, Layout, RichText, Ui};

/// One figure: its name, its value, what it means.
struct Figure {
    name: &'static str,
    value: String,
    hint: &'static str,
}

/// All figures, most wanted first: narrow windows show the first ones.
fn figures(k: &Kpis) -> Vec<Figure> {
    let seconds = |us: Option<u64>| us.map_or("–".to_owned(), format::duration_us);
    let total = u64::from(k.kv_total);
    let figure = |name, value, hint| Figure { name, value, hint };
    vec![
        figure("running", format::count(k.num_running.into()), "Requests in the batch"),
        figure("waiting", format::count(k.num_waiting.into()), "Requests in the queue"),
        figure("tok/s", format::rate(k.tokens_per_s), "Output tokens per second of all requests, last 3 s"),
        figure("KV used", format::percent(k.kv_used.into(), total), "Share of KV blocks held by requests"),
        figure("KV peak", format::percent(k.kv_peak.into(), total), "Largest share in the history"),
        figure("prefix hit", format::percent(k.hit_tokens, k.query_tokens), "Prompt tokens found in the cache"),
        figure("TTFT p50", seconds(k.ttft_p50_us), "Median time from submit to first token"),
        figure("TTFT p95", seconds(k.ttft_p95_us), "19 of 20 requests were faster"),
        figure("ITL p50", seconds(k.itl_p50_us), "Median time between two tokens of a request"),
        figure("preempted", format::count(k.preemptions), "Requests taken out of the batch for lack of blocks"),
    ]
}

/// The strip, one line high.
pub fn kpi_strip_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    ui.with_layout(Layout::right_to_left(Align::Center), |ui| {
        cursor_ui(ui, model, theme, commands);
        ui.with_layout(Layout::left_to_right(Align::Center), |ui| {
            ui.spacing_mut().item_spacing.x = space::L;
            for figure in figures(&model.kpis()) {
                // What does not fit is left out, from the end.
                if ui.available_width() < 64.0 {
                    break;
                }
                let width = figure_width(ui, &figure);
                if width > ui.available_width() {
                    break;
                }
                figure_ui(ui, theme, &figure);
            }
        });
    });
}

fn figure_width(ui: &Ui, figure: &Figure) -> f32 {
    let text = |text: &str, size| {
        ui.painter()
            .layout_no_wrap(text.to_owned(), egui::FontId::proportional(size), egui::Color32::PLACEHOLDER)
            .size()
            .x
    };
    text(&figure.value, font_size::HEADING) + text(figure.name, font_size::SMALL) + space::XS
}

fn figure_ui(ui: &mut Ui, theme: &Theme, figure: &Figure) {
    ui.horizontal(|ui| {
        ui.spacing_mut().item_spacing.x = space::XS;
        let value = RichText::new(&figure.value).size(font_size::HEADING).color(theme.text_strong);
        ui.label(value).on_hover_text(figure.hint);
        ui.label(small(figure.name, theme.text_weak)).on_hover_text(figure.hint);
    });
}

/// Live or paused, always visible, with the way to the other.
fn cursor_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    match model.cursor() {
        Cursor::Live => {
            if quiet_button(ui, "Pause", "Hold this step; the engine goes on (Space)").clicked() {
                commands.push(InspectCommand::Pause);
            }
            ui.label(RichText::new("Live").strong().color(theme.success));
            let (rect, _) = ui.allocate_exact_size(egui::vec2(8.0, 16.0), egui::Sense::hover());
            ui.painter().circle_filled(rect.center(), 4.0, theme.success);
        }
        Cursor::Paused(step) => {
            let live = egui::Button::new(RichText::new("Go live").color(theme.on_accent)).fill(theme.accent);
            if ui.add(live).on_hover_text("Follow the newest step (Space)").clicked() {
                commands.push(InspectCommand::GoLive);
            }
            if quiet_button(ui, ">", "Next step (.)").clicked() {
                commands.push(InspectCommand::StepBy(1));
            }
            if quiet_button(ui, "<", "Previous step (,)").clicked() {
                commands.push(InspectCommand::StepBy(-1));
            }
            let text = format!("Paused at step {}", format::count(step));
            ui.label(RichText::new(text).strong().color(theme.accent));
        }
    }
}
