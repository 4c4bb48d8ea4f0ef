//! Two rules of input that are easy to get wrong, kept apart from the widgets: when Enter sends, and when a transcript
//! follows its end.

use egui::{Event, ImeEvent, Key, Modifiers};

/// Decides whether Enter sends. While an input method composes, Enter belongs to it.
///
/// Enter sends only if no composition was open before or after this frame's events, and none was committed in this
/// frame or the one before: some systems deliver the Enter that ends a composition together with its text, some one
/// frame later.
#[derive(Clone, Copy, Debug, Default)]
pub struct EnterRule {
    is_composing: bool,
    committed_last_frame: bool,
}

impl EnterRule {
    /// Takes in one frame's events; true when Enter was pressed (without Shift, Ctrl, Alt or Cmd) and sends.
    pub fn frame(&mut self, events: &[Event], has_focus: bool) -> bool {
        let was_composing = self.is_composing;
        let mut committed = false;
        let mut opened = false;
        let mut enter = false;
        for event in events {
            match event {
                Event::Ime(ImeEvent::Preedit { text, .. }) => {
                    self.is_composing = !text.is_empty();
                    opened |= self.is_composing;
                }
                Event::Ime(ImeEvent::Commit(_)) => {
                    self.is_composing = false;
                    committed = true;
                }
                Event::Key { key: Key::Enter, pressed: true, modifiers, .. } if is_plain(*modifiers) => enter = true,
                _ => {}
            }
        }
        if !has_focus {
            self.is_composing = false;
        }
        let sends = enter && has_focus && !was_composing && !opened && !committed && !self.committed_last_frame;
        self.committed_last_frame = committed;
        sends
    }
}

fn is_plain(modifiers: Modifiers) -> bool {
    !(modifiers.shift || modifiers.ctrl || modifiers.alt || modifiers.mac_cmd || modifiers.command)
}

/// Points from the end within which a transcript counts as read to its end.
pub const FOLLOW_DISTANCE: f32 = 48.0;

/// Whether a transcript follows its growing end.
///
/// Any upward input lets go at once; reaching the end by downward input takes hold again. Growth alone changes nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FollowRule {
    pub is_following: bool,
}

impl Default for FollowRule {
    fn default() -> Self {
        FollowRule { is_following: true }
    }
}

/// What the user did to a transcript in one frame.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScrollInput {
    /// Wheel, drag of the bar, Page Up, Home or a selection drag upwards.
    pub is_upward: bool,
    pub is_downward: bool,
    /// End, or the "New text" button.
    pub to_end: bool,
}

impl FollowRule {
    /// `distance` is how far below the viewport the content ends.
    pub fn frame(&mut self, input: ScrollInput, distance: f32) {
        if input.to_end {
            self.is_following = true;
        } else if input.is_upward {
            self.is_following = false;
        } else if input.is_downward && distance <= FOLLOW_DISTANCE {
            self.is_following = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preedit(text: &str) -> Event {
        Event::Ime(ImeEvent::Preedit { text: text.into(), active_range_chars: None })
    }

    fn commit(text: &str) -> Event {
        Event::Ime(ImeEvent::Commit(text.into()))
    }

    fn enter(modifiers: Modifiers) -> Event {
        Event::Key { key: Key::Enter, physical_key: None, pressed: true, repeat: false, modifiers }
    }

    #[test]
    fn enter_belongs_to_an_open_composition() {
        let mut rule = EnterRule::default();
        assert!(!rule.frame(&[preedit("にほ")], true));
        assert!(!rule.frame(&[enter(Modifiers::NONE)], true));
        assert!(!rule.frame(&[commit("日本")], true));
        assert!(!rule.frame(&[enter(Modifiers::NONE)], true), "one frame after the commit");
        assert!(rule.frame(&[enter(Modifiers::NONE)], true));
    }

    #[test]
    fn enter_that_arrives_with_its_composition_does_not_send() {
        for events in [
            vec![preedit("に"), enter(Modifiers::NONE)],
            vec![preedit("に"), preedit(""), enter(Modifiers::NONE)],
            vec![enter(Modifiers::NONE), commit("日本")],
        ] {
            assert!(!EnterRule::default().frame(&events, true), "{events:?}");
        }
        let mut rule = EnterRule::default();
        rule.frame(&[preedit("に")], true);
        assert!(!rule.frame(&[preedit(""), enter(Modifiers::NONE)], true), "the Enter that cancels");
    }

    #[test]
    fn enter_with_a_modifier_or_without_focus_does_not_send() {
        for modifiers in [Modifiers::SHIFT, Modifiers::CTRL, Modifiers::ALT, Modifiers::COMMAND] {
            assert!(!EnterRule::default().frame(&[enter(modifiers)], true));
        }
        assert!(!EnterRule::default().frame(&[enter(Modifiers::NONE)], false));
        assert!(EnterRule::default().frame(&[enter(Modifiers::NONE)], true));
    }

    #[test]
    fn upward_input_lets_go_and_only_reaching_the_end_takes_hold_again() {
        let (up, down) = (
            ScrollInput { is_upward: true, ..Default::default() },
            ScrollInput { is_downward: true, ..Default::default() },
        );
        let mut rule = FollowRule::default();
        rule.frame(ScrollInput::default(), 500.0);
        assert!(rule.is_following, "growth does not let go");
        rule.frame(up, 3.0);
        assert!(!rule.is_following, "even a small step up lets go");
        rule.frame(ScrollInput::default(), 0.0);
        assert!(!rule.is_following, "shrinking content does not take hold");
        rule.frame(down, 49.0);
        assert!(!rule.is_following);
        rule.frame(down, 48.0);
        assert!(rule.is_following);
        rule.frame(up, 0.0);
        rule.frame(ScrollInput { to_end: true, ..Default::default() }, 9000.0);
        assert!(rule.is_following);
    }
}
