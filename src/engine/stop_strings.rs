//! Finds stop strings in streamed text.
//!
//! Guarantees: the text that comes out is what stands before the first completed stop string, whatever the pieces it
//! arrived in;
//! text is held back only while it is a proper prefix of some stop string.

/// Streams text through, up to the first stop string.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The end of the text so far, which may become a stop string.
    held: String,
}

/// What a piece of text led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matched {
    /// Text that is safe to show.
    pub text: String,
    /// The stop string that ended the output.
    pub stop: Option<String>,
}

impl StopMatcher {
    /// Empty stop strings stop nothing.
    pub fn new(stops: &[String]) -> Self {
        StopMatcher { stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: &str) -> Matched {
        if self.stops.is_empty() {
            return Matched { text: piece.to_string(), stop: None };
        }
        self.held.push_str(piece);
        // The first to be complete wins, and of two that end together the longer: so the pieces make no difference.
        let ends = self.stops.iter().filter_map(|s| self.held.find(s.as_str()).map(|at| (at + s.len(), at, s)));
        if let Some((_, at, stop)) = ends.min() {
            let stop = stop.clone();
            let mut text = std::mem::take(&mut self.held);
            text.truncate(at);
            return Matched { text, stop: Some(stop) };
        }
        let safe = self.held.len() - self.longest_open_suffix();
        let rest = self.held.split_off(safe);
        Matched { text: std::mem::replace(&mut self.held, rest), stop: None }
    }

    /// What was held back, at the end of the output.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes at the end of `held` that are a proper prefix of some stop string.
    fn longest_open_suffix(&self) -> usize {
        self.stops
            .iter()
            .map(|stop| {
                let longest = self.held.len().min(stop.len() - 1);
                (1..=longest)
                    .rev()
                    .find(|&n| stop.as_bytes().starts_with(&self.held.as_bytes()[self.held.len() - n..]))
                    .unwrap_or(0)
            })
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut matcher = StopMatcher::new(&stops);
        let mut all = String::new();
        for piece in pieces {
            let matched = matcher.push(piece);
            all.push_str(&matched.text);
            if matched.stop.is_some() {
                return (all, matched.stop);
            }
        }
        all.push_str(&matcher.flush());
        (all, None)
    }

    #[test]
    fn stop_string_is_found_at_every_split() {
        let text = "Grüße, the end.\nUser: more";
        for stop in ["\nUser:", "end", "ß", "Grüße"] {
            let want = &text[..text.find(stop).unwrap()];
            for (i, _) in text.char_indices() {
                for (j, _) in text[i..].char_indices() {
                    let (a, b, c) = (&text[..i], &text[i..i + j], &text[i + j..]);
                    assert_eq!(run(&[stop], &[a, b, c]), (want.into(), Some(stop.into())), "{stop:?} {i} {j}");
                }
            }
        }
    }

    #[test]
    fn text_without_a_stop_string_arrives_whole() {
        let text = "aab aac aa";
        for i in 0..text.len() {
            assert_eq!(run(&["aad", "zz"], &[&text[..i], &text[i..]]), (text.into(), None));
        }
    }

    #[test]
    fn only_a_prefix_of_a_stop_string_is_held() {
        let mut matcher = StopMatcher::new(&["<end>".into()]);
        assert_eq!(matcher.push("text <e").text, "text ");
        assert_eq!(matcher.push("x").text, "<ex");
        assert_eq!(matcher.push("<").text, "");
        assert_eq!(matcher.push("<").text, "<");
        assert_eq!(matcher.flush(), "<");
    }

    #[test]
    fn first_completed_of_several_stop_strings_wins() {
        assert_eq!(run(&["b", "ab"], &["xab"]), ("x".into(), Some("ab".into())));
        for pieces in [&["xab", "c"][..], &["xabc"], &["x", "a", "b", "c"]] {
            assert_eq!(run(&["abc", "b"], pieces), ("xa".into(), Some("b".into())));
        }
    }

    #[test]
    fn empty_stop_string_stops_nothing() {
        assert_eq!(run(&[""], &["abc"]), ("abc".into(), None));
    }
}
