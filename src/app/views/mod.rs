//! What the window shows. Each `_ui` function draws from `&AppState` and answers with commands; what a view remembers
//! between frames (scroll position, measured heights) is its own and never on disk.

pub mod about;
pub mod chat;
pub mod composer;
pub mod dock;
pub mod icons;
pub mod message;
pub mod models;
pub mod palette;
pub mod sessions;
pub mod shell;
pub mod transcript;
pub mod welcome;

use super::chat::ChatId;
use super::command::UiCommand;
use super::state::AppState;
use super::theme::{Theme, space};
use egui_commonmark::CommonMarkCache;
use egui::{Align, Color32, Layout, RichText, Sense, Ui, Vec2};

/// What every view gets: the state to read, the tokens to draw with, a place for commands.
pub struct ViewCtx<'a> {
    pub state: &'a AppState,
    pub theme: Theme,
    pub commands: &'a mut Vec<UiCommand>,
    /// Scratch of the markdown renderer; holds nothing of the chats.
    pub markdown: &'a mut CommonMarkCache,
}

impl ViewCtx<'_> {
    pub fn send(&mut self, command: UiCommand) {
        self.commands.push(command);
    }

    /// The colour that stands for a chat everywhere.
    pub fn hue(&self, chat: ChatId) -> Color32 {
        self.state.owners.owner_color(&self.theme, chat.0)
    }
}

/// A dot in an owner's colour, in line with text.
pub fn owner_dot(ui: &mut Ui, color: Color32) {
    let (rect, _) =
        ui.allocate_exact_size(Vec2::new(10.0, ui.text_style_height(&egui::TextStyle::Body)), Sense::hover());
    ui.painter().circle_filled(rect.center(), 4.0, color);
}

/// Small, quiet text.
pub fn small(text: impl Into<String>, color: Color32) -> RichText {
    RichText::new(text).small().color(color)
}

/// A button that looks like text until it is hovered.
pub fn quiet_button(ui: &mut Ui, text: impl Into<String>) -> egui::Response {
    let text = small(text, ui.visuals().weak_text_color());
    ui.add(egui::Button::new(text).frame_when_inactive(false))
}

/// The one button that a screen is about.
pub fn primary_button(ui: &mut Ui, theme: &Theme, text: &str) -> egui::Response {
    ui.add(egui::Button::new(RichText::new(text).color(theme.on_accent)).fill(theme.accent))
}

/// Lays children out from the right; the row is as high as a button.
pub fn right_to_left<R>(ui: &mut Ui, add: impl FnOnce(&mut Ui) -> R) -> R {
    ui.with_layout(Layout::right_to_left(Align::Center), add).inner
}

/// A thin bar that is filled to `share` (0 to 1).
pub fn thin_bar(ui: &mut Ui, width: f32, share: f32, fill: Color32, track: Color32) -> egui::Response {
    let (rect, response) = ui.allocate_exact_size(Vec2::new(width, space::S), Sense::hover());
    let bar = egui::Rect::from_center_size(rect.center(), Vec2::new(width, 4.0));
    ui.painter().rect_filled(bar, 2.0, track);
    if share > 0.0 {
        let mut filled = bar;
        filled.set_width((bar.width() * share.clamp(0.0, 1.0)).max(4.0));
        ui.painter().rect_filled(filled, 2.0, fill);
    }
    response
}
