//! What the keyboard does in Inspect: moving, zooming, searching; and the list of keys.

use super::block_map::{MapChoice, zoomed};
use super::paint::small;
use super::panel::Panel;
use super::workspace::InspectView;
use crate::app::inspect::model::{InspectCommand, InspectModel, Selection};
use crate::app::theme::{Theme, space};
use crate::ids::{BlockId, RequestId};
use egui::{Event, Grid, Id, Key, Modal, RichText, TextEdit, Ui};

/// Steps that A and D move through time.
const PAN_STEPS: i64 = 32;

/// Every key of the workspace and what it does.
pub const KEYS: [(&str, &str); 12] = [
    ("Space", "hold this step, or follow the newest"),
    (", and .", "one step back or forward"),
    ("A and D", "32 steps back or forward"),
    ("Home and End", "the first step, the newest step"),
    ("W and S", "zoom the map in or out"),
    ("F", "fit the whole pool"),
    ("Arrows", "the neighbours of the selected block"),
    ("1 to 4", "details, queue, forks, prefixes"),
    ("/", "find a request by name or number, or a block by number"),
    ("Tab and Enter", "walk through buttons and lists, press them"),
    ("Escape", "let go of the selection"),
    ("?", "this list"),
];

/// Keys of the workspace; none while text is being typed.
pub fn keys(ui: &Ui, view: &mut InspectView, model: &InspectModel, commands: &mut Vec<InspectCommand>) {
    let ctx = ui.ctx();
    if ctx.text_edit_focused() {
        return;
    }
    let typed = |text: &str| ui.input(|i| i.events.iter().any(|e| matches!(e, Event::Text(t) if t == text)));
    if typed("?") {
        view.is_help_open = !view.is_help_open;
    }
    if view.is_help_open {
        return;
    }
    if typed("/") && view.find.is_none() {
        view.find = Some(Find::default());
    }
    for (text, panel) in ["1", "2", "3", "4"].into_iter().zip(Panel::CHOICES) {
        if typed(text) {
            view.show_panel(panel.0);
        }
    }
    let is_free = ctx.memory(|m| m.focused().is_none());
    let pressed = |key: Key| ui.input(|i| i.modifiers.is_none() && i.key_pressed(key));
    let steps = [(Key::Comma, -1), (Key::Period, 1), (Key::A, -PAN_STEPS), (Key::D, PAN_STEPS)];
    for (key, by) in steps {
        if pressed(key) {
            commands.push(InspectCommand::StepBy(by));
        }
    }
    // Space and Enter belong to the button that has the focus.
    if is_free && pressed(Key::Space) {
        commands.push(InspectCommand::TogglePause);
    }
    if pressed(Key::Home) {
        commands.push(InspectCommand::GoToFirst);
    }
    if pressed(Key::End) {
        commands.push(InspectCommand::GoLive);
    }
    if pressed(Key::Escape) && model.selection().is_some() {
        commands.push(InspectCommand::ClearSelection);
    }
    if let Some(map) = model.map() {
        let choice = MapChoice { order: view.order, filter: view.filter, zoom: view.zoom };
        let level = view.map.level_idx(choice, map, view.map_size);
        if pressed(Key::W) {
            view.zoom = Some(zoomed(level, 1));
        }
        if pressed(Key::S) {
            view.zoom = Some(zoomed(level, -1));
        }
        if pressed(Key::F) {
            view.zoom = None;
        }
        if is_free && let Some(Selection::Block(block)) = model.selection() {
            move_selection(&pressed, view.map.cols, map.cells().len() as u32, block, commands);
        }
    }
}

/// Arrow keys go to the neighbours of the selected block.
fn move_selection(
    pressed: &impl Fn(Key) -> bool,
    cols: u32,
    num_blocks: u32,
    block: BlockId,
    commands: &mut Vec<InspectCommand>,
) {
    let cols = i64::from(cols);
    for (key, by) in [(Key::ArrowLeft, -1), (Key::ArrowRight, 1), (Key::ArrowUp, -cols), (Key::ArrowDown, cols)] {
        let to = i64::from(block.0) + by;
        if pressed(key) && (1..i64::from(num_blocks)).contains(&to) {
            commands.push(InspectCommand::Select(Selection::Block(BlockId(to as u32))));
        }
    }
}

/// The search field while it is open.
#[derive(Clone, Debug, Default)]
pub struct Find {
    text: String,
}

/// Selects what is typed; Enter keeps it, Escape lets go.
pub fn find_ui(
    ui: &mut Ui,
    view: &mut InspectView,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    let Some(find) = &mut view.find else { return };
    let found = found(model, &find.text);
    if !find.text.trim().is_empty() && found.is_none() {
        ui.label(small("nothing has this name", theme.warn));
    }
    let field = TextEdit::singleline(&mut find.text).hint_text("Request or block").desired_width(150.0);
    let response = ui.add(field);
    if response.lost_focus() {
        if ui.input(|i| i.key_pressed(Key::Escape)) {
            commands.push(InspectCommand::ClearSelection);
        }
        view.find = None;
        return;
    }
    if !response.has_focus() {
        response.request_focus();
    }
    if response.changed()
        && let Some(found) = self::found(model, &find.text)
    {
        commands.push(InspectCommand::Select(found));
    }
}

/// A block by its number, a request by its number after `#` or by a part of its name; those at the step shown.
fn found(model: &InspectModel, text: &str) -> Option<Selection> {
    let text = text.trim().to_lowercase();
    if text.is_empty() {
        return None;
    }
    if let Some(id) = text.strip_prefix('#').and_then(|id| id.parse().ok()) {
        let id = RequestId(id);
        return model.rows().iter().any(|r| r.id == id).then_some(Selection::Request(id));
    }
    if let Ok(block) = text.parse::<u32>() {
        let is_there = block > 0 && model.map().is_some_and(|map| (block as usize) < map.cells().len());
        return is_there.then_some(Selection::Block(BlockId(block)));
    }
    model.rows().iter().find(|r| r.label.to_lowercase().contains(&text)).map(|r| Selection::Request(r.id))
}

/// The list of keys, over everything.
pub fn help_ui(ui: &Ui, is_open: &mut bool, theme: &Theme) {
    if !*is_open {
        return;
    }
    let modal = Modal::new(Id::unique("inspect keys")).show(ui.ctx(), |ui| {
        ui.set_width(380.0);
        ui.label(RichText::new("Keys of Inspect").heading().color(theme.text_strong));
        ui.add_space(space::S);
        Grid::new("keys").num_columns(2).spacing([space::L, space::XS]).show(ui, |ui| {
            for (key, what) in KEYS {
                ui.label(RichText::new(key).strong().color(theme.text));
                ui.label(RichText::new(what).color(theme.text_weak));
                ui.end_row();
            }
        });
        ui.add_space(space::M);
        ui.button("Close").clicked()
    });
    if modal.inner || modal.should_close() {
        *is_open = false;
    }
}
