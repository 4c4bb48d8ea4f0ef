//! The side panel's five faces: details, queue, forks, prefixes, kernels.

use super::detail::detail_ui;
use super::forks::{ForksView, forks_ui};
use super::kernels::kernels_ui;
use super::prefixes::{PrefixesView, prefixes_ui};
use super::queue::queue_ui;
use crate::app::inspect::model::{InspectCommand, InspectModel};
use crate::app::theme::Theme;
use egui::Ui;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Panel {
    Details,
    Queue,
    Forks,
    Prefixes,
    Kernels,
}

impl Panel {
    /// With name and hint, as a row of choices takes them.
    pub const CHOICES: [(Panel, &'static str, &'static str); 5] = [
        (Panel::Details, "Details", "The selection and the step shown"),
        (Panel::Queue, "Queue", "What holds the queue up, who is next, who gave way"),
        (Panel::Forks, "Forks", "Forked requests as trees, and what their shared blocks save"),
        (Panel::Prefixes, "Prefixes", "Cached prefixes: hits, tiers, pins"),
        (Panel::Kernels, "Kernels", "Where the last step's time on the GPU went"),
    ];
}

/// What the faces keep from frame to frame.
#[derive(Default)]
pub struct PanelView {
    forks: ForksView,
    prefixes: PrefixesView,
}

pub fn panel_ui(
    ui: &mut Ui,
    panel: Panel,
    view: &mut PanelView,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    match panel {
        Panel::Details => detail_ui(ui, model, theme, commands),
        Panel::Queue => queue_ui(ui, model, theme, commands),
        Panel::Forks => forks_ui(ui, &mut view.forks, model, theme, commands),
        Panel::Prefixes => prefixes_ui(ui, &mut view.prefixes, model, theme, commands),
        Panel::Kernels => kernels_ui(ui, model, theme, commands),
    }
}
