//! What a step moved beside computing: copies on write, swaps, pins. In words.

use crate::app::format;
use crate::ids::RequestId;
use crate::telemetry::{BlockDelta, StepRecord};

/// Counts by request, in order of first mention.
#[derive(Default)]
struct Tally(Vec<(Option<RequestId>, u64)>);

impl Tally {
    fn add(&mut self, request: Option<RequestId>) {
        match self.0.iter_mut().find(|(r, _)| *r == request) {
            Some((_, n)) => *n += 1,
            None => self.0.push((request, 1)),
        }
    }
}

/// One line per kind of move and request; empty where nothing was moved.
pub fn move_lines(record: &StepRecord, name: impl Fn(RequestId) -> String) -> Vec<String> {
    let (mut copies, mut outs, mut ins) = (Tally::default(), Tally::default(), Tally::default());
    let (mut pins, mut unpins) = (0, 0);
    for delta in &record.deltas {
        match delta {
            BlockDelta::Copy { request, .. } => copies.add(Some(*request)),
            BlockDelta::SwapOut { request, .. } => outs.add(*request),
            BlockDelta::SwapIn { request, .. } => ins.add(Some(*request)),
            BlockDelta::Pin { .. } => pins += 1,
            BlockDelta::Unpin { .. } => unpins += 1,
            BlockDelta::Alloc { .. }
            | BlockDelta::Fill { .. }
            | BlockDelta::Share { .. }
            | BlockDelta::Unref { .. }
            | BlockDelta::CacheIdle { .. }
            | BlockDelta::Evict { .. }
            | BlockDelta::Free { .. }
            | BlockDelta::Publish { .. }
            | BlockDelta::HostFree { .. } => {}
        }
    }
    let blocks = |n: u64| format::counted(n, "block");
    let mut lines = Vec::new();
    for (request, n) in outs.0 {
        lines.push(match request {
            Some(request) => format!("Swapped out {} of {} to host memory", blocks(n), name(request)),
            None => format!("Moved {} to host memory", format::counted(n, "cached block")),
        });
    }
    for (request, n) in ins.0.into_iter().filter_map(|(r, n)| Some((r?, n))) {
        lines.push(format!("Brought back {} for {} from host memory", blocks(n), name(request)));
    }
    for (request, n) in copies.0.into_iter().filter_map(|(r, n)| Some((r?, n))) {
        let which = if n == 1 { "a shared one" } else { "shared ones" };
        lines.push(format!("Copied {} for {} before it wrote into {which}", blocks(n), name(request)));
    }
    for (n, word) in [(pins, "Pinned"), (unpins, "Let go of")] {
        if n > 0 {
            let what = if word == "Pinned" { format::counted(n, "block") } else { format::counted(n, "pinned block") };
            lines.push(format!("{word} {what}"));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::BlockId;

    #[test]
    fn moves_are_told_by_request() {
        let (a, b) = (RequestId(1), RequestId(2));
        let copy = |to| BlockDelta::Copy { from: BlockId(1), to: BlockId(to), request: a };
        let deltas = vec![
            BlockDelta::SwapOut { block: BlockId(4), host: 0, request: Some(b) },
            BlockDelta::SwapOut { block: BlockId(5), host: 1, request: Some(b) },
            BlockDelta::SwapOut { block: BlockId(6), host: 2, request: None },
            copy(7),
            BlockDelta::SwapIn { host: 0, block: BlockId(8), request: b },
            BlockDelta::Pin { block: BlockId(1) },
        ];
        let record = StepRecord { deltas, ..StepRecord::default() };
        assert_eq!(
            move_lines(&record, |id| format!("R{id}")),
            [
                "Swapped out 2 blocks of R2 to host memory",
                "Moved 1 cached block to host memory",
                "Brought back 1 block for R2 from host memory",
                "Copied 1 block for R1 before it wrote into a shared one",
                "Pinned 1 block",
            ]
        );
        let record = StepRecord { deltas: vec![copy(7), copy(8), BlockDelta::Unpin { block: BlockId(1) }], ..record };
        assert_eq!(
            move_lines(&record, |id| format!("R{id}")),
            ["Copied 2 blocks for R1 before it wrote into shared ones", "Let go of 1 pinned block"]
        );
        assert!(move_lines(&StepRecord::default(), |_| String::new()).is_empty());
    }
}
