//! Words that flags and the settings file use for a choice of a few.

use super::ConfigError;
use crate::engine::options::PreemptionMode;
use crate::telemetry::{QueuePolicy, VictimPolicy};

pub const PREEMPTION_MODES: [(&str, PreemptionMode); 3] =
    [("auto", PreemptionMode::Auto), ("recompute", PreemptionMode::Recompute), ("swap", PreemptionMode::Swap)];

pub const SCHEDULING_POLICIES: [(&str, QueuePolicy); 4] = [
    ("fair", QueuePolicy::Fair),
    ("fcfs", QueuePolicy::Fcfs),
    ("priority", QueuePolicy::Priority),
    ("longest-prefix", QueuePolicy::LongestPrefix),
];

pub const VICTIM_POLICIES: [(&str, VictimPolicy); 3] = [
    ("last-in", VictimPolicy::LastIn),
    ("least-computed", VictimPolicy::LeastComputed),
    ("priority", VictimPolicy::Priority),
];

/// The meaning of the word that a flag or the file gives; the first of `words` where neither does.
pub fn word_of<T: Copy>(
    name: &'static str,
    words: &[(&str, T)],
    flag: Option<&str>,
    file: &Option<String>,
) -> Result<T, ConfigError> {
    let Some(word) = flag.or(file.as_deref()) else { return Ok(words[0].1) };
    words.iter().find(|(known, _)| *known == word).map(|(_, meaning)| *meaning).ok_or_else(|| {
        let known: Vec<&str> = words.iter().map(|(known, _)| *known).collect();
        ConfigError::Invalid { name, message: format!("must be one of {}, not `{word}`", known.join(", ")) }
    })
}
