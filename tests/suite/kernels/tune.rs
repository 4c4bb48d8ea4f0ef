//! The tuner on the machine's adapter: nothing that it may choose is wrong, and its time is kept.

use std::time::Duration;

use kvasir::kernels::attention::{Shape, Variant};
use kvasir::kernels::kv_layout::KvFormat;
use kvasir::kernels::matmul::{Ends, Fusion, Precision};
use kvasir::kernels::pack::Format;
use kvasir::kernels::tile::ProductKey;
use kvasir::kernels::tune::TuneKey;
use kvasir::kernels::{DeviceClass, PackedMatrix, tune};
use kvasir::model::dtype::DType;
use kvasir::model::spec::Activation;

use super::harness::{Rig, rigs};

#[test]
fn each_way_of_each_kind_of_product_gives_the_priors_bits() {
    for rig in rigs().iter().filter(|rig| !rig.name.contains("checked")) {
        let format = |dtype| PackedMatrix::format(&rig.gpu, dtype, 256);
        let key = |dtype, precision, fusion, tokens| ProductKey {
            format: format(dtype),
            precision,
            n: 192,
            k: 256,
            fusion,
            tokens,
        };
        let mut keys = vec![
            key(DType::F16, Precision::F32, Fusion::default(), 4),
            key(DType::Q6_K, Precision::I8, Fusion::default(), 8),
            key(DType::MXFP4, Precision::I8, Fusion::default(), 2),
        ];
        if Fusion::is_possible(rig.class) {
            keys.push(key(DType::Q4_1, Precision::I8, Fusion { is_normed: false, ends: Ends::Hidden }, 8));
        }
        if Fusion::can_gate(format(DType::Q4_1), rig.class) {
            let gated = Fusion { is_normed: true, ends: Ends::Gated(Activation::Silu) };
            keys.push(key(DType::Q4_1, Precision::I8, gated, 1));
        }
        let keys: Vec<TuneKey> = keys.into_iter().map(TuneKey::Product).collect();
        check(rig, &keys);
        let mut late = 0;
        tune::tune(&rig.gpu, &keys, Duration::ZERO, &mut |_| late += 1).unwrap();
        assert_eq!(late, 0, "{}: nothing is measured without time", rig.name);
    }
}

/// Every way gives the prior's bits and has a time.
fn check(rig: &Rig, keys: &[TuneKey]) {
    let mut found = Vec::new();
    tune::tune(&rig.gpu, keys, Duration::from_secs(300), &mut |outcome| found.push(outcome))
        .unwrap_or_else(|e| panic!("{}: {e}", rig.name));
    assert_eq!(found.iter().map(|outcome| outcome.key).collect::<Vec<_>>(), keys, "{}: all in time", rig.name);
    let pairs = DeviceClass::of(rig.gpu.caps()).multiplies_pairs;
    for outcome in &found {
        let prior = match &outcome.key {
            TuneKey::Product(key) => key.prior(rig.class, pairs).to_string(),
            TuneKey::Attention(key) => key.prior(rig.class).to_string(),
        };
        assert_eq!(outcome.candidates[0].way, prior, "{}", rig.name);
        for candidate in &outcome.candidates {
            assert_eq!(candidate.ban, None, "{} {}: {}", rig.name, outcome.key, candidate.way);
            let is_measured = candidate.us.is_some_and(|us| us > 0.0) || outcome.candidates.len() == 1;
            assert!(is_measured, "{} {}: {}", rig.name, outcome.key, candidate.way);
        }
    }
}

#[test]
fn each_way_of_attention_gives_the_priors_bits() {
    for rig in rigs().iter().filter(|rig| !rig.name.contains("checked")) {
        let shape = |num_heads, num_kv_heads, head_dim, kv| Shape {
            num_heads,
            num_kv_heads,
            head_dim,
            kv,
            softcap: None,
            has_sinks: false,
        };
        let usual = shape(9, 3, 64, KvFormat::F16);
        let is_quantised = usual.can_quantise(rig.class);
        let odd = Shape { softcap: Some(30.0), has_sinks: true, ..shape(4, 1, 40, KvFormat::I8) };
        let keys = [
            usual.key(Variant::Single, is_quantised),
            usual.key(Variant::Several, is_quantised),
            odd.key(Variant::Several, false),
            // Nothing but dims to choose.
            shape(2, 2, 32, KvFormat::F32).key(Variant::Single, false),
        ];
        assert!(keys[..3].iter().all(|key| key.candidates(rig.class).len() > 1), "{}", rig.name);
        check(rig, &keys.map(TuneKey::Attention));
    }
}

#[test]
fn a_type_whose_rows_are_no_whole_blocks_is_refused_by_name() {
    for rig in rigs().iter().take(1) {
        let key = ProductKey {
            format: Format::of(DType::Q6_K),
            precision: Precision::I8,
            n: 64,
            k: 100,
            fusion: Fusion::default(),
            tokens: 1,
        };
        let fault = tune::tune(&rig.gpu, &[TuneKey::Product(key)], Duration::from_secs(60), &mut |_| ())
            .unwrap_err()
            .to_string();
        assert!(fault.contains("100 elements"), "{fault}");
    }
}
