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
    hint: String,
}

/// All figures, most wanted first: narrow windows show the first ones.
fn figures(k: &Kpis) -> Vec<Figure> {
    let seconds = |us: Option<u64>| us.map_or("–".to_owned(), format::duration_us);
    let total = u64::from(k.kv_total);
    let figure = |name, value, hint: &str| Figure { name, value, hint: hint.to_owned() };
    vec![
        figure("running", format::count(k.num_running.into()), "Requests in the batch"),
        figure("waiting", format::count(k.num_waiting.into()), "Requests in the queue"),
        figure("tok/s", format::rate(k.tokens_per_s), "Output tokens per second of all requests, last 3 s"),
        figure("KV used", format::percent(k.kv_used.into(), total), "Share of KV blocks held by requests"),
        figure("KV peak", format::percent(k.kv_peak.into(), total), "Largest share in the history"),
        Figure {
            name: "prefix hit",
            value: format::percent(k.hit_tokens, k.query_tokens),
            hint: format!("Prompt tokens found in the cache. {}", k.hits.words()),
        },
        Figure {
            name: "recompute tax",
            value: tax_words(k.recomputed_tokens, k.computed_tokens),
            hint: format!(
                "Share of all computed tokens that were computed again after preemptions: {} of {}. Swapping to host \
                 memory instead costs copies, not tokens",
                format::count(k.recomputed_tokens),
                format::count(k.computed_tokens)
            ),
        },
        figure("preempted", format::count(k.preemptions), "Requests taken out of the batch for lack of blocks"),
        figure("swapped", format::count(k.swaps), "Of those preempted: saved their blocks to host memory"),
        figure("copied", format::count(k.copies), "Blocks copied because one of their sharers was about to write"),
        figure("TTFT p50", seconds(k.ttft_p50_us), "Median time from submit to first token"),
        figure("TTFT p95", seconds(k.ttft_p95_us), "19 of 20 requests were faster"),
        figure("ITL p50", seconds(k.itl_p50_us), "Median time between two tokens of a request"),
    ]
}

/// One decimal below 10 %: the tax is small where all is well.
fn tax_words(recomputed: u64, computed: u64) -> String {
    match recomputed as f64 * 100.0 / computed.max(1) as f64 {
        0.0 => "0 %".to_owned(),
        share if share < 0.1 => "under 0.1 %".to_owned(),
        share if share < 9.95 => format!("{share:.1} %"),
        _ => format::percent(recomputed, computed),
    }
}

/// The strip: each figure above its name.
pub fn kpi_strip_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    ui.with_layout(Layout::right_to_left(Align::Center), |ui| {
        cursor_ui(ui, model, theme, commands);
        ui.with_layout(Layout::left_to_right(Align::Center), |ui| {
            ui.spacing_mut().item_spacing.x = space::L;
            for figure in figures(&model.kpis()) {
                // What does not fit is left out, from the end.
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
    text(&figure.value, font_size::HEADING).max(text(figure.name, font_size::SMALL))
}

fn figure_ui(ui: &mut Ui, theme: &Theme, figure: &Figure) {
    ui.vertical(|ui| {
        ui.spacing_mut().item_spacing.y = 0.0;
        let value = RichText::new(&figure.value).size(font_size::HEADING).color(theme.text_strong);
        ui.label(value).on_hover_text(&figure.hint);
        ui.label(small(figure.name, theme.text_weak)).on_hover_text(&figure.hint);
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
