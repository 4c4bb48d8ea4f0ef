//! The table of keys: one place for the window, the palette and the list of keys.

use super::command::UiCommand;
use super::state::{ThemeChoice, Workspace};
use egui::{Context, Key, KeyboardShortcut, Modifiers};

/// An action with a name, and a key where it has one.
pub struct Action {
    pub name: &'static str,
    pub key: Option<KeyboardShortcut>,
    pub command: UiCommand,
}

const CTRL_SHIFT: Modifiers = Modifiers::COMMAND.plus(Modifiers::SHIFT);

fn action(name: &'static str, modifiers: Modifiers, key: Key, command: UiCommand) -> Action {
    Action { name, key: Some(KeyboardShortcut::new(modifiers, key)), command }
}

fn named(name: &'static str, command: UiCommand) -> Action {
    Action { name, key: None, command }
}

/// Everything the palette offers, in its order.
pub fn actions() -> Vec<Action> {
    use UiCommand as C;
    let ctrl = Modifiers::COMMAND;
    vec![
        action("New chat", ctrl, Key::N, C::NewChat),
        action("Split the view", ctrl, Key::Backslash, C::Split),
        action("Close pane", ctrl, Key::W, C::CloseFocusedPane),
        action("Regenerate answer", CTRL_SHIFT, Key::R, C::RegenerateLast),
        action("Copy last answer", CTRL_SHIFT, Key::C, C::CopyLastAnswer),
        named("Stop all answers", C::StopAll),
        action("Next chat", Modifiers::ALT, Key::ArrowDown, C::OpenNeighbour { offset: 1 }),
        action("Previous chat", Modifiers::ALT, Key::ArrowUp, C::OpenNeighbour { offset: -1 }),
        action("Show Chat", ctrl, Key::Num1, C::ShowWorkspace(Workspace::Chat)),
        action("Show Models", ctrl, Key::Num2, C::ShowWorkspace(Workspace::Models)),
        action("Show Inspect", ctrl, Key::Num3, C::ShowWorkspace(Workspace::Inspect)),
        action("Show or hide the list of chats", ctrl, Key::B, C::ToggleSessionList),
        action("Show or hide the dock", ctrl, Key::J, C::ToggleDock),
        named("Open a model file…", C::PickModelFile),
        named("Unload the model", C::Unload),
        named("Run the demo: four chats, one system prompt", C::RunDemo),
        named("Theme: dark", C::SetTheme(ThemeChoice::Dark)),
        named("Theme: light", C::SetTheme(ThemeChoice::Light)),
        named("Theme: as the system", C::SetTheme(ThemeChoice::Auto)),
        named("About and diagnostics", C::SetAbout(true)),
    ]
}

/// Turns the keys of this frame into commands. `is_palette_open` leaves Escape and the arrows to the palette.
pub fn take_keys(ctx: &Context, is_palette_open: bool, commands: &mut Vec<UiCommand>) {
    let palette = [KeyboardShortcut::new(Modifiers::COMMAND, Key::K), KeyboardShortcut::new(CTRL_SHIFT, Key::P)];
    let toggles = palette.iter().any(|key| ctx.input_mut(|i| i.consume_shortcut(key)));
    if toggles {
        commands.push(if is_palette_open { UiCommand::ClosePalette } else { UiCommand::OpenPalette });
    }
    if is_palette_open {
        return;
    }
    // Keys with more modifiers first: Ctrl+Shift+C must not be taken for Ctrl+C.
    let mut table = actions();
    table.sort_by_key(|a| std::cmp::Reverse(a.key.map_or(0, |k| count(k.modifiers))));
    for action in table {
        if action.key.is_some_and(|key| ctx.input_mut(|i| i.consume_shortcut(&key))) {
            commands.push(action.command);
        }
    }
}

fn count(m: Modifiers) -> u32 {
    [m.alt, m.shift, m.ctrl || m.command || m.mac_cmd].into_iter().filter(|on| *on).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_action_has_a_name_and_no_key_stands_twice() {
        let table = actions();
        for (i, a) in table.iter().enumerate() {
            assert!(!a.name.is_empty());
            for b in &table[..i] {
                assert_ne!(a.name, b.name);
                assert!(a.key.is_none() || a.key != b.key, "{} and {} have the same key", a.name, b.name);
            }
        }
    }
}
