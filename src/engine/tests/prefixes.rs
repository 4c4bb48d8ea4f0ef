//! Pins, evictions and queue figures through the handle.

use super::*;
use crate::protocol::PinRequest;
use crate::telemetry::{EngineSnapshot, QueuePolicy, WaitReason};

fn pin(text: &str, adapter: u64) -> PinRequest {
    PinRequest {
        owner: OwnerTag { id: 99, label: "pins".into() },
        name: Some("system".into()),
        tokens: text.bytes().map(u32::from).collect(),
        cache_salt: 0,
        adapter,
    }
}

fn snapshot(engine: &EngineHandle, what: &str, holds: impl Fn(&EngineSnapshot) -> bool) -> Arc<EngineSnapshot> {
    eventually(what, || holds(&engine.telemetry().snapshot()));
    engine.telemetry().snapshot()
}

#[test]
fn a_prefix_is_pinned_found_counted_unpinned_and_forgotten() {
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let system = "You are a careful assistant who answers in short words.";
    let heard = hear(&engine.pin_prefix(pin(system, 0)).unwrap());
    assert_eq!((heard.finish, heard.text), (Some(FinishReason::MaxTokens), String::new()));
    let text = format!("{system} Hello");
    assert_eq!(hear(&engine.submit(request(&text, 3)).unwrap()).usage.cached_tokens, 48);
    let adapted = GenerateRequest { adapter: 5, ..request(&text, 3) };
    assert_eq!(hear(&engine.submit(adapted).unwrap()).usage.cached_tokens, 0, "another adapter, other K and V");

    let shown = snapshot(&engine, "the hit is shown", |s| s.prefixes.first().is_some_and(|p| p.hits == 1));
    let prefix = &shown.prefixes[0];
    assert_eq!((prefix.name.as_deref(), prefix.pinned, prefix.blocks, prefix.tokens), (Some("system"), true, 3, 48));
    assert_eq!((prefix.hit_tokens, shown.kv.pinned), (48, 3));
    assert_eq!(shown.blocks.iter().filter(|block| block.pinned).count(), 3);
    let (records, _) = engine.telemetry().records_after(None);
    let pins = records.iter().flat_map(|r| &r.deltas).filter(|d| matches!(d, BlockDelta::Pin { .. })).count();
    assert_eq!(pins, 3);

    engine.reset_prefix_cache();
    snapshot(&engine, "only the pin is left", |s| s.kv.cached_idle == 0 && s.kv.pinned == 3);
    engine.evict_prefix(prefix.id);
    engine.unpin_prefix(prefix.id);
    snapshot(&engine, "the pin lets go", |s| s.kv.pinned == 0 && s.kv.cached_idle == 3);
    engine.evict_prefix(prefix.id);
    snapshot(&engine, "nothing is kept", |s| s.kv.free == s.kv.total);
}

#[test]
fn a_prefix_that_the_cache_has_is_pinned_by_its_id_and_named_anew() {
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let system = "You are a careful assistant who answers in short words.";
    for _ in 0..2 {
        hear(&engine.submit(request(&format!("{system} Hello"), 3)).unwrap());
    }
    let shown = snapshot(&engine, "the hit is shown", |s| s.prefixes.first().is_some_and(|p| p.hits == 1));
    let found = shown.prefixes[0].clone();
    assert!(!found.pinned && found.blocks >= 3);
    let owner = || OwnerTag { id: 7, label: "pins".into() };
    let keep = |name: &str| hear(&engine.keep_prefix(found.id, Some(name.into()), owner()).unwrap());
    assert_eq!((keep("first").error, keep("second").error), (None, None));
    let is_named = |s: &EngineSnapshot| s.prefixes.first().is_some_and(|p| p.name.as_deref() == Some("second"));
    let shown = snapshot(&engine, "it has its new name", is_named);
    assert_eq!((shown.prefixes[0].id, shown.prefixes[0].pinned), (found.id, true));
    assert_eq!(shown.kv.pinned, found.blocks, "pinned once");
    assert_eq!(hear(&engine.keep_prefix(1, None, owner()).unwrap()).error, Some(RunError::PrefixLost));
}

#[test]
fn a_pin_that_takes_too_much_is_refused_with_the_numbers_and_outlives_a_lost_device() {
    let mut options = FakeOptions::small();
    options.faults = vec![FakeFault::None, FakeFault::None, FakeFault::DeviceLost];
    let engine = EngineHandle::start_fake(options);
    let long = "x".repeat(16 * 65);
    let heard = hear(&engine.pin_prefix(pin(&long, 0)).unwrap());
    assert_eq!(heard.error, Some(RunError::PinLimit { needed: 65, pinned: 0, limit: 64 }));
    let short = hear(&engine.pin_prefix(pin("too short", 0)).unwrap()).error;
    assert!(matches!(short, Some(RunError::InvalidParam(fault)) if fault.field == "prefix"));
    let system = "You are a careful assistant.....";
    assert_eq!(hear(&engine.pin_prefix(pin(system, 0)).unwrap()).error, None);
    hear(&engine.submit(request("something else", 8)).unwrap());
    let shown =
        snapshot(&engine, "it is pinned again", |s| s.kv.pinned == 2 && s.requests.iter().all(|r| r.finish.is_some()));
    assert_eq!(engine.step_totals().recoveries, 1, "{:?}", shown.kv);
    let cached = hear(&engine.submit(request(&format!("{system} Hello"), 3)).unwrap()).usage.cached_tokens;
    assert_eq!(cached, 32);
}

#[test]
fn the_snapshot_tells_shares_and_what_holds_the_queue() {
    let options = FakeOptions { max_num_seqs: 1, step_delay: Duration::from_millis(2), ..FakeOptions::small() };
    let engine = EngineHandle::start_fake(options);
    let of = |id: u64, text: &str| GenerateRequest {
        owner: OwnerTag { id, label: format!("client {id}") },
        ..request(text, 60)
    };
    let runs: Vec<Run> = [1, 1, 2].iter().map(|id| engine.submit(of(*id, "Tell me")).unwrap()).collect();
    let shown = snapshot(&engine, "two wait", |s| s.queue.clients.len() == 2 && s.queue.binding.is_some());
    assert_eq!(
        (shown.queue.policy, shown.queue.binding),
        (QueuePolicy::Fair, Some(WaitReason::Slots { max_num_seqs: 1 }))
    );
    let waiting: u32 = shown.queue.clients.iter().map(|client| client.waiting).sum();
    assert_eq!(waiting, 2);
    assert!(shown.queue.clients.iter().all(|client| client.owner.label == format!("client {}", client.owner.id)));
    runs.iter().for_each(|run| assert_eq!(hear(run).tokens.len(), 60));
}
