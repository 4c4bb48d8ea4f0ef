//! Pins, evictions and queue figures through the handle.

use super::*;
use crate::protocol::PinRequest;
use crate::telemetry::{self, EngineSnapshot, QueuePolicy, Tier, WaitReason};

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
    assert_eq!((heard.finish, heard.text), (Some(FinishReason::Pinned), String::new()));
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

/// Tiers on: a small pool, host memory, and a folder.
fn tiers(dir: &std::path::Path) -> FakeOptions {
    FakeOptions { num_host_blocks: 64, prefix_cache_dir: Some(dir.to_path_buf()), ..FakeOptions::small() }
}

fn num_files(dir: &std::path::Path) -> usize {
    let mut folders = vec![dir.to_path_buf()];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else {
                files += usize::from(entry.path().extension().is_some_and(|x| x == "kv"));
            }
        }
    }
    files
}

#[test]
fn what_is_forgotten_is_gone_from_host_memory_and_disk_too() {
    let dir = tempfile::tempdir().unwrap();
    let (secret, other) =
        ("A long secret that nobody is to find again, ever.", "Something else that is long, and stays.");
    let engine = EngineHandle::start_fake(tiers(dir.path()));
    for text in [secret, other] {
        hear(&engine.submit(request(text, 20)).unwrap());
        // A second time, so that the list of prefixes has it.
        hear(&engine.submit(request(text, 20)).unwrap());
    }
    eventually("both are on disk", || num_files(dir.path()) >= 6);
    let before = num_files(dir.path());
    let shown = engine.telemetry().snapshot();
    let head: Vec<u32> = secret.bytes().take(16).map(u32::from).collect();
    let of_secret = |s: &EngineSnapshot| s.prefixes.iter().find(|p| p.head[..16] == head[..]).cloned();
    // The block at which its hits ended follows others, which lead to it alone.
    engine.evict_prefix(of_secret(&shown).expect("it is listed").id);
    eventually("its files are gone", || num_files(dir.path()) < before);
    let found = hear(&engine.submit(request(secret, 20)).unwrap()).usage.cached_tokens;
    assert_eq!(found, 0, "no tier has the secret");
    assert!(hear(&engine.submit(request(other, 20)).unwrap()).usage.cached_tokens >= 32, "the other is there");
    drop(engine);

    let engine = EngineHandle::start_fake(tiers(dir.path()));
    assert!(hear(&engine.submit(request(other, 1)).unwrap()).usage.cached_tokens >= 32, "also after a restart");
    engine.reset_prefix_cache();
    for text in [secret, other] {
        assert_eq!(hear(&engine.submit(request(text, 1)).unwrap()).usage.cached_tokens, 0, "nothing is found");
    }
    engine.reset_prefix_cache();
    eventually("no file is left", || num_files(dir.path()) == 0);
    drop(engine);
    let engine = EngineHandle::start_fake(tiers(dir.path()));
    assert_eq!(hear(&engine.submit(request(other, 1)).unwrap()).usage.cached_tokens, 0);
}

#[test]
fn a_reset_leaves_pinned_prefixes_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let system = "You are a careful assistant who answers in short words.";
    let engine = EngineHandle::start_fake(tiers(dir.path()));
    hear(&engine.pin_prefix(pin(system, 0)).unwrap());
    hear(&engine.submit(request("A question that has nothing to do with it, really.", 20)).unwrap());
    eventually("all is on disk", || num_files(dir.path()) >= 6);
    engine.reset_prefix_cache();
    eventually("the pin's files are left", || num_files(dir.path()) == 3);
    drop(engine);
    let engine = EngineHandle::start_fake(tiers(dir.path()));
    assert_eq!(hear(&engine.submit(request(&format!("{system} Hello"), 1)).unwrap()).usage.cached_tokens, 48);
}

/// A prompt of so many tokens that begins like no other.
fn prompt_of(letter: &str, len: usize) -> String {
    format!("{letter} {}", "and so on ".repeat(len)).chars().take(len).collect()
}

fn cached(engine: &EngineHandle, text: &str) -> u32 {
    hear(&engine.submit(request(text, 1)).unwrap()).usage.cached_tokens
}

#[test]
fn what_a_prefix_was_worth_outlives_its_blocks_and_counts_what_every_tier_had() {
    let dir = tempfile::tempdir().unwrap();
    let options = || FakeOptions { num_blocks: 30, ..tiers(dir.path()) };
    let (first, other) = (prompt_of("a", 300), prompt_of("b", 400));
    let engine = EngineHandle::start_fake(options());
    let spared: u32 = (0..3).map(|_| cached(&engine, &first)).sum();
    let of = |s: &EngineSnapshot, letter: u8| s.prefixes.iter().find(|p| p.head[0] == u32::from(letter)).cloned();
    let shown = snapshot(&engine, "both hits are shown", |s| of(s, b'a').is_some_and(|p| p.hits == 2));
    let prefix = of(&shown, b'a').unwrap();
    assert_eq!((prefix.hit_tokens, prefix.tokens, prefix.tier), (u64::from(spared), 288, Tier::Gpu));
    assert_eq!(cached(&engine, &other), 0);
    let has_left = |s: &EngineSnapshot| of(s, b'a').is_some_and(|p| p.tier == Tier::Host);
    let shown = snapshot(&engine, "it is shown after its eviction", has_left);
    assert_eq!(of(&shown, b'a').unwrap(), telemetry::PrefixInfo { tier: Tier::Host, ..prefix.clone() });
    assert_eq!(cached(&engine, &first), 288);
    let shown = snapshot(&engine, "the third hit is shown", |s| of(s, b'a').is_some_and(|p| p.hits == 3));
    let again = of(&shown, b'a').unwrap();
    assert_eq!((again.id, again.hit_tokens, again.tier), (prefix.id, prefix.hit_tokens + 288, Tier::Gpu));
    let from_host = again.host_hit_tokens;
    assert!((16..=288).contains(&from_host) && shown.kv.host_hit_tokens == from_host, "{again:?}");
    drop(engine);

    let engine = EngineHandle::start_fake(options());
    assert_eq!(cached(&engine, &first), 288);
    let shown = snapshot(&engine, "the hit is shown", |s| of(s, b'a').is_some_and(|p| p.hits == 1));
    let found = of(&shown, b'a').unwrap();
    assert_eq!((found.id, found.hit_tokens, found.host_hit_tokens, found.disk_hit_tokens), (prefix.id, 288, 0, 288));
    assert_eq!((shown.kv.host_hit_tokens, shown.kv.disk_hit_tokens), (0, 288));
    assert_eq!(found.head, prefix.head);
}

#[test]
fn a_prefix_in_host_memory_is_pinned_and_evicted_by_its_id() {
    let dir = tempfile::tempdir().unwrap();
    let engine = EngineHandle::start_fake(FakeOptions { num_blocks: 30, ..tiers(dir.path()) });
    let (first, second, other) = (prompt_of("a", 150), prompt_of("b", 150), prompt_of("c", 440));
    for text in [&first, &first, &second, &second, &other] {
        cached(&engine, text);
    }
    let of = |s: &EngineSnapshot, letter: u8| s.prefixes.iter().find(|p| p.head[0] == u32::from(letter)).cloned();
    let have_left = |s: &EngineSnapshot| [b'a', b'b'].map(|l| of(s, l).map(|p| p.tier)) == [Some(Tier::Host); 2];
    let shown = snapshot(&engine, "both have left the pool", have_left);
    let [a, b] = [b'a', b'b'].map(|letter| of(&shown, letter).unwrap());
    let owner = OwnerTag { id: 7, label: "pins".into() };
    assert_eq!(hear(&engine.keep_prefix(a.id, Some("kept".into()), owner).unwrap()).error, None);
    engine.evict_prefix(b.id);
    let shown = snapshot(&engine, "one is evicted", |s| of(s, b'b').is_none());
    let a = of(&shown, b'a').unwrap();
    assert_eq!((a.pinned, a.name.as_deref(), a.tokens, a.tier), (true, Some("kept"), 144, Tier::Gpu));
    assert_eq!((cached(&engine, &second), cached(&engine, &first)), (0, 144));
}

#[test]
fn a_follower_learns_what_can_be_found_also_after_the_cache_was_lost() {
    use crate::telemetry::prefixes::PrefixChange;
    let faults = [vec![FakeFault::None; 6], vec![FakeFault::DeviceLost]].concat();
    let engine = EngineHandle::start_fake(FakeOptions { faults, ..FakeOptions::small() });
    // What was there before is told at first.
    hear(&engine.submit(request("A prompt that fills two blocks of KV.", 2)).unwrap());
    let telemetry = engine.telemetry();
    let batches = telemetry.prefix_feed().follow(64);
    hear(&engine.submit(request("Another prompt, that fills three blocks of the pool.", 6)).unwrap());
    assert!(engine.wait_idle(Duration::from_secs(10)));
    let (mut findable, mut num_clears) = (Vec::new(), 0);
    for (at, batch) in batches.try_iter().enumerate() {
        assert_eq!(batch.seq, at as u64);
        for change in batch.changes {
            match change {
                PrefixChange::Stored { hash, parent, tokens, .. } => {
                    assert!(parent.is_none_or(|parent| findable.contains(&parent)), "a parent comes first");
                    assert_eq!(tokens.len(), 16);
                    findable.push(hash);
                }
                PrefixChange::Removed { hash } => findable.retain(|known| *known != hash),
                PrefixChange::Cleared => (num_clears, findable) = (num_clears + 1, Vec::new()),
            }
        }
    }
    assert_eq!((num_clears, telemetry.snapshot().preemptions_total), (2, 0), "at the start, and at the loss");
    assert_eq!(findable.len(), 3, "of what was computed since");
}
