//! About: version, adapter, and figures that help when something is slow.

use super::{ViewCtx, small};
use crate::app::command::UiCommand;
use crate::app::format;
use crate::app::frame_stats::FrameStats;
use crate::app::store::StoreHealth;
use crate::app::theme::space;
use crate::app::words;
use egui::{Grid, Id, Modal, RichText, Ui};

pub fn about_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui, frames: &FrameStats) {
    if !cx.state.is_about_open {
        return;
    }
    let rows = facts(cx, frames);
    let modal = Modal::new(Id::unique("about")).show(ui.ctx(), |ui| {
        ui.set_width(420.0);
        ui.label(RichText::new("Kvasir").heading().color(cx.theme.text_strong));
        ui.label(small(concat!("Version ", env!("CARGO_PKG_VERSION")), cx.theme.text_weak));
        ui.add_space(space::M);
        Grid::new("facts").num_columns(2).spacing([space::L, space::XS]).show(ui, |ui| {
            for (name, value) in &rows {
                ui.label(small(*name, cx.theme.text_weak));
                ui.add(egui::Label::new(value).wrap());
                ui.end_row();
            }
        });
        ui.add_space(space::M);
        ui.horizontal(|ui| {
            if ui.button("Copy diagnostics").clicked() {
                let lines: Vec<String> = rows.iter().map(|(name, value)| format!("{name}: {value}")).collect();
                cx.commands.push(UiCommand::Copy(lines.join("\n")));
            }
            if ui.button("Close").clicked() {
                cx.commands.push(UiCommand::SetAbout(false));
            }
        });
    });
    if modal.should_close() {
        cx.send(UiCommand::SetAbout(false));
    }
}

fn facts(cx: &ViewCtx<'_>, frames: &FrameStats) -> Vec<(&'static str, String)> {
    let mut rows = vec![("Window drawn by", cx.state.window_adapter.name.clone())];
    if let Some(model) = cx.state.model() {
        let a = &model.adapter;
        rows.push(("Engine runs on", format!("{} ({}, {})", a.name, a.backend, a.driver)));
        rows.push(("Model", format!("{} {}", words::model_name(model), model.quant)));
        let blocks = format::count(model.num_blocks.into());
        rows.push(("KV cache", format!("{blocks} blocks of {} tokens", model.block_size)));
    }
    let chats = match &cx.state.store_health {
        StoreHealth::Writing => format!("{} saved", format::counted(cx.state.chats.len() as u64, "chat")),
        StoreHealth::ReadOnly { reason } | StoreHealth::MemoryOnly { reason } | StoreHealth::Failing { reason } => {
            reason.clone()
        }
    };
    rows.push(("Chats", chats));
    if let Some(p95_us) = frames.p95_us() {
        let text = format!("{} (95 of 100 frames take less), {} frames", format::duration_us(p95_us), frames.count());
        rows.push(("Building a frame", text));
    }
    rows
}
