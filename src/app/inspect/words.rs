//! The pictures of Inspect in words: sentences for people and screen readers, tables for copying.
//!
//! Guarantees: every mark in a picture has its text here; CSV fields are quoted where needed.

use super::history::Entry;
use super::host::HostCell;
use super::map::{BlockMap, Cell};
use super::model::InspectModel;
use super::move_words::move_lines;
use super::queue_words::preempt_mode_words;
use super::requests::{RequestRow, RowState};
use crate::app::format;
use crate::ids::{BlockId, RequestId};
use crate::protocol::FinishReason;
use crate::telemetry::{BlockState, RowKind, StepRecord, WaitReason};
use std::fmt::Write as _;

/// Names listed before "and n more".
const MAX_NAMES: usize = 4;

/// What the step did, in one clause: "1 prefill chunk of 256 tokens for Rust lifetimes, 3 decodes".
pub fn batch_words(record: &StepRecord, name: impl Fn(RequestId) -> String) -> String {
    let chunks: Vec<_> = record.rows.iter().filter(|r| r.kind != RowKind::Decode).collect();
    let mut parts = Vec::new();
    for row in chunks.iter().take(MAX_NAMES) {
        let what = if matches!(row.kind, RowKind::Recompute { .. }) { "recomputed chunk" } else { "prefill chunk" };
        let tokens = format::counted(u64::from(row.num_tokens), "token");
        parts.push(format!("1 {what} of {tokens} for {}", name(row.request)));
    }
    if chunks.len() > MAX_NAMES {
        parts.push(format::counted((chunks.len() - MAX_NAMES) as u64, "more chunk"));
    }
    match record.num_decode() {
        0 => {}
        n => parts.push(format::counted(u64::from(n), "decode")),
    }
    if parts.is_empty() { "nothing was computed".to_owned() } else { parts.join(", ") }
}

/// The whole step as a sentence, as the text twin of the step panel.
pub fn step_sentence(record: &StepRecord, name: impl Fn(RequestId) -> String) -> String {
    let mut out = format!("Step {}: {}", format::count(record.step), batch_words(record, &name));
    for line in event_lines(record, &name) {
        let _ = write!(out, "; {}", lower_first(&line));
    }
    if record.total_us > 0 {
        let _ = write!(out, "; {}", time_words(record));
    }
    out
}

/// "17.3 ms: schedule 0.2, GPU 15.9, output 1.2"
pub fn time_words(record: &StepRecord) -> String {
    format!(
        "{}: schedule {}, GPU {}, output {}",
        format::duration_us(u64::from(record.total_us)),
        format::ms(u64::from(record.sched_us)),
        format::ms(u64::from(record.gpu_us)),
        format::ms(u64::from(record.output_us))
    )
}

/// What changed beside the batch: admitted, preempted, finished, evicted, waiting; one line each.
pub fn event_lines(record: &StepRecord, name: impl Fn(RequestId) -> String) -> Vec<String> {
    let mut lines = Vec::new();
    if !record.admitted.is_empty() {
        let names: Vec<String> = record
            .admitted
            .iter()
            .map(|&id| match cached_of(record, id) {
                0 => name(id),
                cached => format!("{} ({} from cache)", name(id), format::counted(u64::from(cached), "token")),
            })
            .collect();
        lines.push(format!("Admitted {}", list(&names)));
    }
    for p in &record.preempted {
        lines.push(format!("Preempted {} for {}: {}", name(p.victim), name(p.beneficiary), preempt_mode_words(p)));
    }
    for (id, reason) in &record.finished {
        lines.push(format!("Finished {}: {}", name(*id), finish_words(reason)));
    }
    for (id, pin) in &record.yielded_pins {
        lines.push(format!("Unpinned {}: a request needed its blocks", pin.clone().unwrap_or_else(|| name(*id))));
    }
    if record.kv.evicted_this_step > 0 {
        lines.push(format!(
            "Evicted {} from the cache",
            format::counted(u64::from(record.kv.evicted_this_step), "block")
        ));
    }
    lines.extend(move_lines(record, &name));
    if let Some(waiting) = waiting_words(record, &name) {
        lines.push(waiting);
    }
    lines
}

/// "Waiting: Poem needs 12 blocks, 3 free; 2 more behind it"
pub fn waiting_words(record: &StepRecord, name: impl Fn(RequestId) -> String) -> Option<String> {
    let (id, reason) = record.waiting.first()?;
    let joint = match reason {
        WaitReason::Blocks { .. } => " ",
        WaitReason::Behind { .. } => ", ",
        WaitReason::Slots { .. }
        | WaitReason::Budget
        | WaitReason::Preemption
        | WaitReason::Prefix { .. }
        | WaitReason::Share { .. }
        | WaitReason::Gang { .. } => " as ",
    };
    let mut out = format!("Waiting: {}{joint}{}", name(*id), wait_words_named(reason, &name));
    if record.waiting.len() > 1 {
        let _ = write!(out, "; {} more behind it", format::count(record.waiting.len() as u64 - 1));
    }
    Some(out)
}

fn cached_of(record: &StepRecord, id: RequestId) -> u32 {
    record.rows.iter().find(|r| r.request == id).map_or(0, |r| match r.kind {
        RowKind::Prefill { cached } | RowKind::Recompute { cached } => cached,
        RowKind::Decode => 0,
    })
}

/// Why a request waits.
pub fn wait_words(reason: &WaitReason) -> String {
    wait_words_named(reason, |id| format!("request {id}"))
}

/// Why a request waits, with the other requests called by `name`.
pub fn wait_words_named(reason: &WaitReason, name: impl Fn(RequestId) -> String) -> String {
    match reason {
        WaitReason::Behind { position } => format!("number {} in the queue", position + 1),
        WaitReason::Blocks { needed, available } => {
            format!(
                "needs {}, {} free",
                format::counted(u64::from(*needed), "block"),
                format::count(u64::from(*available))
            )
        }
        WaitReason::Slots { max_num_seqs } => format!("all {max_num_seqs} places of the batch are taken"),
        WaitReason::Budget => "the step's token budget is used up".to_owned(),
        WaitReason::Preemption => "a preemption happened in this step".to_owned(),
        WaitReason::Prefix { leader } => format!("{} computes its prefix now, to be shared", name(*leader)),
        WaitReason::Share { ahead } => format!("{} of a client that had less goes first", name(*ahead)),
        WaitReason::Gang { needed, available } => {
            format!("its beams join together: {needed} slots are needed, {available} are there")
        }
    }
}

pub fn finish_words(reason: &FinishReason) -> String {
    match reason {
        FinishReason::StopToken(_) => "end of answer".to_owned(),
        FinishReason::StopString(s) => format!("stop string {s:?}"),
        FinishReason::MaxTokens => "token limit".to_owned(),
        FinishReason::ContextFull => "context full".to_owned(),
        FinishReason::Aborted => "stopped".to_owned(),
        FinishReason::Pinned => "prefix pinned".to_owned(),
    }
}

/// One or two words for the table's state column.
pub fn state_words(state: &RowState) -> String {
    match state {
        RowState::Waiting { was_preempted: true, .. } => "Preempted".to_owned(),
        RowState::Waiting { .. } => "Waiting".to_owned(),
        RowState::Reading { to, total, .. } => {
            format!("Reading {}", format::percent(u64::from(*to), u64::from(*total)))
        }
        RowState::Decoding => "Writing".to_owned(),
        RowState::Idle => "In batch".to_owned(),
        RowState::Finished(reason) => format!("Done: {}", finish_words(reason)),
    }
}

/// The table's last column: why it waits; empty if it does not.
pub fn why_waiting(row: &RequestRow) -> String {
    match &row.state {
        RowState::Waiting { reason: Some(reason), .. } => upper_first(&wait_words(reason)),
        RowState::Waiting { reason: None, was_preempted: true } => "Gave its blocks to an older request".to_owned(),
        RowState::Waiting { reason: None, .. } => "Not looked at yet".to_owned(),
        _ => String::new(),
    }
}

/// What a row of the batch did: "prefill 128 to 256 (64 from cache)", "decode at 412".
pub fn row_words(row: &crate::telemetry::SeqStep) -> String {
    let range =
        format!("{} to {}", format::count(u64::from(row.from)), format::count(u64::from(row.from + row.num_tokens)));
    match row.kind {
        RowKind::Decode if row.num_tokens > 1 => {
            format!("decode {range} ({} forced by its grammar)", format::count(u64::from(row.num_tokens - 1)))
        }
        RowKind::Decode => format!("decode at {}", format::count(u64::from(row.from))),
        RowKind::Prefill { cached: 0 } => format!("prefill {range}"),
        RowKind::Prefill { cached } => format!("prefill {range} ({} from cache)", format::count(u64::from(cached))),
        RowKind::Recompute { .. } => format!("recompute {range}"),
    }
}

/// The word for a block's state.
pub fn block_state_words(cell: &Cell) -> String {
    match cell.state {
        BlockState::Null => "null block".to_owned(),
        BlockState::Free => "free".to_owned(),
        BlockState::CachedIdle => "cached, idle".to_owned(),
        BlockState::Active if cell.refs >= 2 => format!("used, shared by {}", cell.refs),
        BlockState::Active => "used".to_owned(),
    }
}

/// The hover answer: one line.
pub fn block_line(model: &InspectModel, map: &BlockMap, block: BlockId) -> String {
    let Some(cell) = map.cell(block) else { return String::new() };
    let mut out = format!("Block {block} · {}", block_state_words(cell));
    let block_size = model.snapshot().block_size;
    match cell.state {
        BlockState::Active | BlockState::CachedIdle => {
            let _ = write!(out, " · {}", model.owner_of(cell.owner).label);
            let _ = write!(out, " · {}/{block_size} tokens", cell.filled);
            for (is_so, word) in [
                (cell.is_pinned, "pinned".to_owned()),
                (cell.copied_from != BlockId::NULL, format!("copy of block {}", cell.copied_from)),
                (cell.is_from_host, "came back from host memory".to_owned()),
            ] {
                if is_so {
                    let _ = write!(out, " · {word}");
                }
            }
        }
        BlockState::Free | BlockState::Null => {}
    }
    if cell.last_step > 0 {
        let ago = map.step.saturating_sub(u64::from(cell.last_step));
        let _ = write!(out, " · {}", steps_ago(ago));
    }
    out
}

/// "in this step", "1 step ago", "12 steps ago"
pub fn steps_ago(steps: u64) -> String {
    if steps == 0 { "in this step".to_owned() } else { format!("{} ago", format::counted(steps, "step")) }
}

/// The map in a sentence: its accessible name.
pub fn map_sentence(map: &BlockMap) -> String {
    let c = map.counts();
    format!(
        "Block map: {} used, {} cached, {} free of {}; {} shared, {} saved by sharing",
        format::count(u64::from(c.used())),
        format::count(u64::from(c.cached_idle)),
        format::count(u64::from(c.free)),
        format::counted(u64::from(c.total()), "block"),
        format::count(u64::from(c.shared)),
        format::counted(u64::from(c.saved), "block"),
    )
}

/// Host memory in a sentence: "Host memory: 8 blocks of Poem wait, 4 cached; 52 of 64 places free".
pub fn host_sentence(model: &InspectModel, map: &BlockMap, num_places: u32) -> String {
    let mut waiting: Vec<(RequestId, u64)> = Vec::new();
    for request in map.host().iter().filter_map(|(_, cell)| cell.request) {
        match waiting.iter_mut().find(|(r, _)| *r == request) {
            Some((_, n)) => *n += 1,
            None => waiting.push((request, 1)),
        }
    }
    let swapped =
        |(r, n): &(RequestId, u64)| format!("{} of {}", format::counted(*n, "block"), model.requests().label(*r));
    let mut parts: Vec<String> = waiting.iter().take(MAX_NAMES).map(swapped).collect();
    if waiting.len() > MAX_NAMES {
        parts.push(format::counted((waiting.len() - MAX_NAMES) as u64, "more request"));
    }
    if map.host().num_cached() > 0 {
        parts.push(format::counted(map.host().num_cached().into(), "cached block"));
    }
    let held = if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") };
    let free = u64::from(num_places).saturating_sub(map.host().len() as u64);
    let places = format::counted(u64::from(num_places), "place");
    format!("Host memory holds {held}; {} of {places} free", format::count(free))
}

/// One place of host memory in one line.
pub fn host_line(model: &InspectModel, map: &BlockMap, host: u32, cell: Option<&HostCell>) -> String {
    let Some(cell) = cell else { return format!("Place {host} of host memory · free") };
    let mut out = format!("Place {host} of host memory · ");
    let owner = cell.owner.map(|r| model.owner_of(r).label);
    match (cell.request, owner) {
        (Some(_), Some(owner)) => {
            let _ = write!(out, "block {} of {owner}, swapped out until it goes on", cell.logical + 1);
        }
        (_, Some(owner)) => {
            let _ = write!(out, "cached block, last held by {owner}");
        }
        (_, None) => out += "cached block",
    }
    let ago = map.step.saturating_sub(u64::from(cell.since_step));
    let _ = write!(out, " · {}", steps_ago(ago));
    out
}

/// The block map as CSV, free blocks left out.
pub fn blocks_csv(model: &InspectModel, map: &BlockMap) -> String {
    let mut out = String::from("block,state,refs,owner,logical,filled,hash,alloc_step,last_step,pinned,copied_from\n");
    for (i, cell) in map.cells().iter().enumerate().skip(1) {
        if cell.state == BlockState::Free {
            continue;
        }
        let hash = cell.hash.map_or(String::new(), |h| format!("{h:016x}"));
        let owner = csv_field(&model.owner_of(cell.owner).label);
        let state = if cell.state == BlockState::CachedIdle { "cached_idle" } else { "used" };
        let _ = writeln!(
            out,
            "{i},{state},{},{owner},{},{},{hash},{},{},{},{}",
            cell.refs,
            cell.logical,
            cell.filled,
            cell.alloc_step,
            cell.last_step,
            cell.is_pinned,
            if cell.copied_from == BlockId::NULL { String::new() } else { cell.copied_from.to_string() }
        );
    }
    out
}

/// Steps as CSV, oldest first.
pub fn steps_csv<'a>(entries: impl Iterator<Item = &'a Entry>) -> String {
    let mut out = String::from(
        "step,t0_us,total_us,sched_us,gpu_us,output_us,budget,prefill_tokens,decode_rows,running,waiting,\
         preempted,finished,kv_used,kv_cached,kv_free,evicted\n",
    );
    for entry in entries {
        let r = &entry.record;
        let _ = writeln!(
            out,
            "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}",
            r.step,
            r.t0_us,
            r.total_us,
            r.sched_us,
            r.gpu_us,
            r.output_us,
            r.budget,
            r.num_prefill_tokens(),
            r.num_decode(),
            r.num_running,
            r.num_waiting,
            r.preempted.len(),
            r.finished.len(),
            r.kv.used,
            r.kv.cached_idle,
            r.kv.free,
            r.kv.evicted_this_step
        );
    }
    out
}

/// The request table as CSV.
pub fn requests_csv(rows: &[RequestRow]) -> String {
    let mut out =
        String::from("id,owner,state,prompt,cached,output,blocks,ttft_us,tok_per_s,preemptions,why_waiting\n");
    for r in rows {
        let _ = writeln!(
            out,
            "{},{},{},{},{},{},{},{},{:.1},{},{}",
            r.id,
            csv_field(&r.label),
            csv_field(&state_words(&r.state)),
            r.prompt_tokens,
            r.cached_tokens,
            r.output_tokens,
            r.num_blocks,
            r.ttft_us.map_or(String::new(), |us| us.to_string()),
            r.tokens_per_s,
            r.preemptions,
            csv_field(&why_waiting(r))
        );
    }
    out
}

fn csv_field(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

fn list(names: &[String]) -> String {
    if names.len() <= MAX_NAMES {
        names.join(", ")
    } else {
        format!("{} and {} more", names[..MAX_NAMES].join(", "), names.len() - MAX_NAMES)
    }
}

fn upper_first(text: &str) -> String {
    map_first(text, |c| c.to_uppercase().collect())
}

fn lower_first(text: &str) -> String {
    map_first(text, |c| c.to_lowercase().collect())
}

fn map_first(text: &str, change: impl Fn(char) -> String) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |c| change(c) + chars.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::SeqSlot;
    use crate::telemetry::{PreemptMode, Preemption, SeqStep, VictimPolicy};

    fn name(id: RequestId) -> String {
        ["Rust lifetimes", "Poem", "Translate"].get(id.idx()).map_or("?", |s| s).to_owned()
    }

    fn row(request: u64, kind: RowKind, from: u32, num_tokens: u32) -> SeqStep {
        SeqStep {
            request: RequestId(request),
            slot: SeqSlot(0),
            kind,
            from,
            num_tokens,
            sampled: None,
            forced: Vec::new(),
        }
    }

    #[test]
    fn a_step_reads_as_a_sentence() {
        let record = StepRecord {
            step: 1716,
            sched_us: 200,
            gpu_us: 15_900,
            output_us: 1_200,
            total_us: 17_300,
            rows: vec![
                row(0, RowKind::Prefill { cached: 64 }, 64, 256),
                row(1, RowKind::Decode, 99, 1),
                row(1, RowKind::Decode, 12, 1),
            ],
            admitted: vec![RequestId(0)],
            waiting: vec![(RequestId(1), WaitReason::Blocks { needed: 12, available: 3 })],
            ..StepRecord::default()
        };
        assert_eq!(
            step_sentence(&record, name),
            "Step 1,716: 1 prefill chunk of 256 tokens for Rust lifetimes, 2 decodes; \
             admitted Rust lifetimes (64 tokens from cache); waiting: Poem needs 12 blocks, 3 free; \
             17.3 ms: schedule 0.2, GPU 15.9, output 1.2"
        );
    }

    #[test]
    fn preemption_names_victim_and_beneficiary() {
        let preempted = vec![Preemption {
            victim: RequestId(1),
            beneficiary: RequestId(0),
            freed_blocks: 6,
            lost_tokens: 93,
            mode: PreemptMode::Recompute,
            policy: VictimPolicy::LastIn,
            scores: Vec::new(),
        }];
        let record = StepRecord { preempted, ..StepRecord::default() };
        assert_eq!(
            event_lines(&record, name),
            ["Preempted Poem for Rust lifetimes: 6 blocks freed, 93 tokens to recompute"]
        );
        assert_eq!(batch_words(&record, name), "nothing was computed");
    }

    #[test]
    fn csv_quotes_what_would_break_a_line() {
        assert_eq!(csv_field("plain"), "plain");
        assert_eq!(csv_field("a, \"b\""), "\"a, \"\"b\"\"\"");
    }

    #[test]
    fn every_wait_reason_has_words() {
        for (reason, words) in [
            (WaitReason::Behind { position: 1 }, "number 2 in the queue"),
            (WaitReason::Blocks { needed: 1, available: 0 }, "needs 1 block, 0 free"),
            (WaitReason::Slots { max_num_seqs: 8 }, "all 8 places of the batch are taken"),
            (WaitReason::Budget, "the step's token budget is used up"),
            (WaitReason::Preemption, "a preemption happened in this step"),
            (WaitReason::Prefix { leader: RequestId(4) }, "request 4 computes its prefix now, to be shared"),
        ] {
            assert_eq!(wait_words(&reason), words);
        }
    }
}
