//! The frame around every workspace: top bar, rail, status bar, dock, and what changes in a small window.

use super::icons::{Icon, icon_button, sized_icon_button};
use super::{ViewCtx, right_to_left, small};
use crate::app::command::UiCommand;
use crate::app::format;
use crate::app::inspect::kpi::StatusLine;
use crate::app::state::{AppState, DockTab, ThemeChoice, Workspace};
use crate::app::store::StoreHealth;
use crate::app::theme::{Theme, size, space};
use crate::app::words;
use crate::engine::handle::{EngineStatus, LoadedModel};
use egui::{Align, Button, Frame, Label, Layout, Margin, Panel, Popup, RichText, Stroke, Ui, Vec2, vec2};

/// Below this width the dock becomes an overlay.
pub const DOCK_BESIDE_WIDTH: f32 = 1180.0;
/// Below this width the list of chats becomes an overlay.
pub const LIST_BESIDE_WIDTH: f32 = 960.0;
/// Below this height the status bar keeps three items.
const FULL_STATUS_HEIGHT: f32 = 620.0;

pub fn bar_frame(theme: &Theme) -> Frame {
    Frame::new().fill(theme.bg_app).inner_margin(Margin::symmetric(space::S as i8, 0))
}

pub fn top_bar_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    Panel::top("top_bar").exact_size(size::TOP_BAR).frame(bar_frame(&cx.theme)).show(ui, |ui| {
        ui.horizontal_centered(|ui| {
            ui.add_space(space::XS);
            ui.label(RichText::new("kvasir").strong().color(cx.theme.text_strong));
            ui.add_space(space::S);
            model_chip_ui(cx, ui);
            right_to_left(ui, |ui| {
                ui.spacing_mut().item_spacing.x = 2.0;
                if icon_button(ui, Icon::Info, "About and diagnostics").clicked() {
                    cx.send(UiCommand::SetAbout(true));
                }
                theme_button_ui(cx, ui);
                if icon_button(ui, Icon::Dock, "Show or hide the dock (Ctrl+J)").clicked() {
                    cx.send(UiCommand::ToggleDock);
                }
                if icon_button(ui, Icon::Split, "Split the view (Ctrl+\\)").clicked() {
                    cx.send(UiCommand::Split);
                }
                if icon_button(ui, Icon::List, "Show or hide the list of chats (Ctrl+B)").clicked() {
                    cx.send(UiCommand::ToggleSessionList);
                }
                ui.add_space(space::S);
                search_ui(cx, ui);
            });
        });
    });
}

fn search_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let text = if ui.available_width() > 260.0 { "Search or run a command" } else { "Search" };
    let button = Button::new(small(text, cx.theme.text_weak))
        .shortcut_text(small("Ctrl+K", cx.theme.text_faint))
        .fill(cx.theme.bg_panel);
    let width = (ui.available_width() - space::S).clamp(60.0, 280.0);
    if ui.add_sized([width, 26.0], button).clicked() {
        cx.send(UiCommand::OpenPalette);
    }
}

fn theme_button_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let (icon, label, next) = match cx.state.theme {
        ThemeChoice::Dark => (Icon::Moon, "Theme: dark", ThemeChoice::Light),
        ThemeChoice::Light => (Icon::Sun, "Theme: light", ThemeChoice::Auto),
        ThemeChoice::Auto => (Icon::HalfMoon, "Theme: as the system", ThemeChoice::Dark),
    };
    if icon_button(ui, icon, label).clicked() {
        cx.send(UiCommand::SetTheme(next));
    }
}

/// The model in a few words, for the chip and for hints.
pub fn model_words(state: &AppState) -> String {
    match &state.engine {
        EngineStatus::NoModel => "No model".into(),
        EngineStatus::Loading { phase, done, total } if *total > 1 => {
            format!("{phase} {}", format::percent(*done, *total))
        }
        EngineStatus::Loading { phase, .. } => phase.clone(),
        EngineStatus::Ready(model) => words::model_name(model),
        EngineStatus::Failed { .. } => "Model not loaded".into(),
    }
}

/// "Q4_1 · 8,192 context · llvmpipe".
pub fn model_facts(model: &LoadedModel) -> String {
    let context = crate::app::prompt::context_limit(model);
    let quant = Some(model.quant.as_str()).filter(|q| !q.is_empty());
    let context = format!("{} context", format::count(context.into()));
    [quant.map(str::to_owned), Some(context), Some(adapter_words(model))]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(" · ")
}

pub fn adapter_words(model: &LoadedModel) -> String {
    let name = short_adapter_name(&model.adapter.name);
    if name.is_empty() { model.adapter.backend.clone() } else { name.to_owned() }
}

/// The adapter's name without the details that drivers put in brackets.
pub fn short_adapter_name(name: &str) -> &str {
    name.split(" (").next().unwrap_or_default().trim()
}

fn model_chip_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let color = match &cx.state.engine {
        EngineStatus::Failed { .. } => cx.theme.error,
        EngineStatus::Ready(_) => cx.theme.text_strong,
        EngineStatus::NoModel | EngineStatus::Loading { .. } => cx.theme.text_weak,
    };
    let is_wide = ui.available_width() > 720.0;
    let mut job = egui::text::LayoutJob::default();
    let format = |color| egui::TextFormat::simple(egui::TextStyle::Small.resolve(ui.style()), color);
    job.append(&model_words(cx.state), 0.0, format(color));
    if let (Some(model), true) = (cx.state.model(), is_wide) {
        job.append(&format!(" · {}", model_facts(model)), 0.0, format(cx.theme.text_weak));
    }
    let max_width = (ui.available_width() * 0.5).clamp(80.0, 460.0);
    let response = ui
        .scope(|ui| {
            ui.set_max_width(max_width);
            ui.add(Button::new(job).fill(cx.theme.bg_panel).truncate())
        })
        .inner
        .on_hover_text("The model");
    Popup::menu(&response).show(|ui| model_menu_ui(cx, ui));
}

fn model_menu_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    ui.set_min_width(220.0);
    match &cx.state.engine {
        EngineStatus::Ready(model) => {
            ui.label(RichText::new(words::model_name(model)).color(cx.theme.text_strong));
            ui.label(small(model_facts(model), cx.theme.text_weak));
            ui.separator();
            if ui.button("Unload").clicked() {
                cx.commands.push(UiCommand::Unload);
            }
        }
        EngineStatus::Loading { phase, .. } => {
            ui.set_max_width(320.0);
            ui.add(Label::new(small(phase, cx.theme.text_weak)).wrap());
            if cx.state.remote_host.is_none() && ui.button("Cancel loading").clicked() {
                cx.commands.push(UiCommand::CancelLoad);
            }
        }
        EngineStatus::Failed { message, fix, .. } => {
            ui.set_max_width(320.0);
            ui.add(Label::new(RichText::new(message).color(cx.theme.error)).wrap());
            if let Some(fix) = fix {
                ui.add(Label::new(fix).wrap());
            }
            ui.separator();
        }
        EngineStatus::NoModel => {
            let name = format!("Get {}", cx.state.default_model.name);
            if ui.button(name).clicked() {
                cx.commands.push(UiCommand::LoadDefaultModel);
            }
        }
    }
    if ui.button("Models on this computer").clicked() {
        cx.commands.push(UiCommand::ShowWorkspace(Workspace::Models));
    }
    if ui.button("Open a file…").clicked() {
        cx.commands.push(UiCommand::PickModelFile);
    }
}

pub fn rail_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let frame = Frame::new().fill(cx.theme.bg_app).inner_margin(Margin::symmetric(4, space::S as i8));
    Panel::left("rail").exact_size(size::RAIL).resizable(false).frame(frame).show(ui, |ui| {
        ui.spacing_mut().item_spacing.y = space::XS;
        for (idx, workspace) in Workspace::ALL.into_iter().enumerate() {
            let icon = match workspace {
                Workspace::Chat => Icon::Chat,
                Workspace::Models => Icon::Models,
                Workspace::Inspect => Icon::Inspect,
            };
            let label = format!("{} (Ctrl+{})", workspace.name(), idx + 1);
            let is_shown = cx.state.workspace == workspace;
            if sized_icon_button(ui, icon, &label, Vec2::splat(36.0), is_shown).clicked() {
                cx.send(UiCommand::ShowWorkspace(workspace));
            }
        }
    });
}

/// Adapter, KV, batch, speed, hits; each item opens Inspect.
pub fn status_bar_ui(cx: &mut ViewCtx<'_>, line: Option<StatusLine>, ui: &mut Ui) {
    let is_low = ui.ctx().content_rect().height() < FULL_STATUS_HEIGHT;
    Panel::bottom("status_bar").exact_size(size::STATUS_BAR).frame(bar_frame(&cx.theme)).show(ui, |ui| {
        ui.horizontal_centered(|ui| {
            ui.spacing_mut().item_spacing.x = 2.0;
            ui.spacing_mut().button_padding = vec2(6.0, 1.0);
            for (idx, (text, help)) in status_items(cx.state, line, is_low).into_iter().enumerate() {
                if idx > 0 {
                    let (rect, _) = ui.allocate_exact_size(vec2(5.0, 12.0), egui::Sense::hover());
                    ui.painter().vline(rect.center().x, rect.y_range(), Stroke::new(1.0, cx.theme.border_strong));
                }
                let button = Button::new(small(text, cx.theme.text_weak)).frame_when_inactive(false).truncate();
                if ui.add(button).on_hover_text(help).clicked() {
                    cx.send(UiCommand::ShowWorkspace(Workspace::Inspect));
                }
            }
            store_health_ui(cx, ui);
        });
    });
}

/// Text and explanation of each item.
fn status_items(state: &AppState, line: Option<StatusLine>, is_low: bool) -> Vec<(String, &'static str)> {
    let (Some(model), Some(line)) = (state.model(), line) else {
        return vec![(model_words(state), "The engine has no model")];
    };
    let items = [
        (line.kv, "KV blocks in use, and kept for prefix hits"),
        (line.batch, "Requests in the batch and in the queue"),
        (line.rate, "Tokens per second of all chats"),
    ];
    let remote = state.remote_host.as_ref().map(|host| (format!("engine at {host}"), "Chats run on this server"));
    if is_low {
        return remote.into_iter().chain(items).collect();
    }
    let adapter = (adapter_words(model), "The adapter that the engine runs on");
    let hit = (line.hit, "Prompt tokens found in the prefix cache");
    remote.into_iter().chain([adapter]).chain(items).chain([hit]).collect()
}

fn store_health_ui(cx: &ViewCtx<'_>, ui: &mut Ui) {
    let (text, reason) = match &cx.state.store_health {
        StoreHealth::Writing => return,
        StoreHealth::ReadOnly { reason } => ("Chats are read-only", reason),
        StoreHealth::MemoryOnly { reason } => ("Chats are not saved", reason),
        StoreHealth::Failing { reason } => ("Chats cannot be saved", reason),
    };
    right_to_left(ui, |ui| {
        ui.label(small(text, cx.theme.warn)).on_hover_text(reason);
    });
}

/// The tabs above the dock's content.
pub fn dock_tabs_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    ui.horizontal(|ui| {
        for (tab, name) in [(DockTab::RunSettings, "Run settings"), (DockTab::Live, "Live")] {
            if ui.add(Button::selectable(cx.state.dock_tab == tab, name)).clicked() {
                cx.send(UiCommand::SetDockTab(tab));
            }
        }
    });
    ui.add_space(space::XS);
}

/// A line over the workspace about something that happened elsewhere.
pub fn notice_ui(cx: &mut ViewCtx<'_>, ui: &mut Ui) {
    let Some(notice) = &cx.state.notice else { return };
    let frame = Frame::new()
        .fill(cx.theme.bg_raised)
        .stroke(Stroke::new(1.0, cx.theme.warn))
        .inner_margin(Margin::symmetric(space::M as i8, space::XS as i8));
    Panel::top("notice").frame(frame).show(ui, |ui| {
        ui.horizontal(|ui| {
            right_to_left(ui, |ui| {
                if icon_button(ui, Icon::Close, "Close this message").clicked() {
                    cx.commands.push(UiCommand::DismissNotice);
                }
                ui.with_layout(Layout::left_to_right(Align::Center), |ui| {
                    ui.add(Label::new(RichText::new(notice).color(cx.theme.text)).truncate());
                });
            });
        });
    });
}
