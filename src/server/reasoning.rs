//! Divides what a model thinks from what it answers: `<think>…</think>` and its kin.
//!
//! Guarantees: the division does not depend on how the text was cut; text is held back only while it may be a mark;
//! space around the marks belongs to them.

/// Marks that models use.
const MARKS: [(&str, &str); 3] = [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")];

/// The marks of a template, if it has some.
pub fn marks_of_template(source: &str) -> Option<(&'static str, &'static str)> {
    MARKS.into_iter().find(|(_, close)| source.contains(close))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Only an opening mark at the very start begins reasoning.
    Start,
    Thinking,
    /// Space after the closing mark is left out.
    Answered,
    Answer,
}

/// Splits one answer.
#[derive(Clone, Debug)]
pub struct ReasoningSplitter {
    open: &'static str,
    close: &'static str,
    state: State,
    held: String,
    has_thought: bool,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    Reasoning(String),
    Answer(String),
}

impl ReasoningSplitter {
    /// `prompt` may end inside of the reasoning, or after it.
    pub fn new((open, close): (&'static str, &'static str), prompt: &str) -> Self {
        let end = prompt.trim_end();
        let state = match (end.ends_with(open), end.ends_with(close)) {
            (true, _) => State::Thinking,
            (false, true) => State::Answer,
            (false, false) => State::Start,
        };
        ReasoningSplitter { open, close, state, held: String::new(), has_thought: false }
    }

    /// True between the marks.
    pub fn is_thinking(&self) -> bool {
        self.state == State::Thinking
    }

    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for c in text.chars() {
            match self.state {
                State::Start => self.start(c, &mut pieces),
                State::Thinking => self.thinking(c, &mut pieces),
                State::Answered if c.is_whitespace() => {}
                State::Answered | State::Answer => {
                    self.state = State::Answer;
                    add(&mut pieces, Piece::Answer(c.to_string()));
                }
            }
        }
        pieces
    }

    /// What was held back.
    pub fn finish(&mut self) -> Option<Piece> {
        let held = std::mem::take(&mut self.held);
        match self.state {
            _ if held.is_empty() => None,
            State::Thinking => Some(Piece::Reasoning(held)),
            _ => Some(Piece::Answer(held)),
        }
    }

    fn start(&mut self, c: char, pieces: &mut Vec<Piece>) {
        self.held.push(c);
        let begun = self.held.trim_start();
        if begun == self.open {
            self.held.clear();
            self.state = State::Thinking;
        } else if !self.open.starts_with(begun) {
            self.state = State::Answer;
            add(pieces, Piece::Answer(std::mem::take(&mut self.held)));
        }
    }

    fn thinking(&mut self, c: char, pieces: &mut Vec<Piece>) {
        if !self.has_thought && self.held.is_empty() && c.is_whitespace() {
            return;
        }
        self.held.push(c);
        // Some templates put the opening mark into the prompt, and the model writes it again.
        if !self.has_thought && self.held == self.open {
            self.held.clear();
            return;
        }
        if let Some(before) = self.held.strip_suffix(self.close) {
            let before = before.trim_end();
            if !before.is_empty() {
                add(pieces, Piece::Reasoning(before.to_owned()));
            }
            self.held.clear();
            self.state = State::Answered;
            return;
        }
        let may_open = !self.has_thought && self.open.starts_with(&self.held);
        let is_mark = |at: &usize| self.close.starts_with(self.held[*at..].trim_start());
        let keep = match may_open {
            true => 0,
            false => self.held.char_indices().map(|(at, _)| at).find(is_mark).unwrap_or(self.held.len()),
        };
        if keep > 0 {
            let rest = self.held.split_off(keep);
            add(pieces, Piece::Reasoning(std::mem::replace(&mut self.held, rest)));
            self.has_thought = true;
        }
    }
}

fn add(pieces: &mut Vec<Piece>, piece: Piece) {
    match (pieces.last_mut(), piece) {
        (Some(Piece::Reasoning(all)), Piece::Reasoning(text)) | (Some(Piece::Answer(all)), Piece::Answer(text)) => {
            all.push_str(&text);
        }
        (_, piece) => pieces.push(piece),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(prompt: &str, text: &str, at: usize) -> (String, String) {
        let mut splitter = ReasoningSplitter::new(MARKS[0], prompt);
        let (mut reasoning, mut answer) = (String::new(), String::new());
        let mut take = |piece: Piece| match piece {
            Piece::Reasoning(text) => reasoning.push_str(&text),
            Piece::Answer(text) => answer.push_str(&text),
        };
        for part in [&text[..at], &text[at..]] {
            splitter.push(part).into_iter().for_each(&mut take);
        }
        splitter.finish().into_iter().for_each(&mut take);
        (reasoning, answer)
    }

    #[test]
    fn reasoning_is_found_at_every_cut() {
        let table = [
            ("", "<think>\nA < b </thin> c\n</think>\n\nYes.", ("A < b </thin> c", "Yes.")),
            ("x<think>\n", "A\n</think>\nYes <think>", ("A", "Yes <think>")),
            ("x<think>\n", "<think>A</think>Yes", ("A", "Yes")),
            ("<think>\n\n</think>\n\n", "Yes </think>", ("", "Yes </think>")),
            ("", "Yes <think>no</think>", ("", "Yes <think>no</think>")),
            ("", "<think>unfinished </th", ("unfinished </th", "")),
            ("", "<thi", ("", "<thi")),
        ];
        for (prompt, text, (reasoning, answer)) in table {
            for at in 0..=text.len() {
                assert_eq!(split(prompt, text, at), (reasoning.into(), answer.into()), "{text:?} at {at}");
            }
        }
    }
}
