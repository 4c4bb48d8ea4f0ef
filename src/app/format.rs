//! Numbers as people read them: one place, so that a figure looks the same wherever it stands.
//!
//! Guarantees: no locale, no allocation beyond the returned text, the same text on every machine.

/// `1226` as `1,226`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// `count` and its noun: `1 block`, `12 blocks`. The plural adds an `s`.
pub fn counted(n: u64, noun: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{} {noun}{s}", count(n))
}

/// Memory in binary units with three significant digits: `512 KiB`, `1.5 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut unit = 0;
    // 1023.5 would be shown as 1024.
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{} {}", three_digits(value), UNITS[unit]) }
}

/// `1.4 GB`, `88 MB`, `512 B`: decimal units, as disks and downloads are sold.
pub fn decimal_bytes(count: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 || value >= 99.5 {
        format!("{value:.0} {}", units[unit])
    } else {
        format!("{value:.1} {}", units[unit])
    }
}

/// The share `part / whole` as whole percent: `62 %`. A whole of 0 gives `0 %`; what is not all is never `100 %`, what
/// is not nothing never `0 %`.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 || part == 0 {
        return "0 %".to_owned();
    }
    let rounded = (part as f64 * 100.0 / whole as f64).round() as u64;
    let shown = if part < whole { rounded.clamp(1, 99) } else { rounded };
    format!("{shown} %")
}

/// A duration with its unit: `0.2 ms`, `17.3 ms`, `420 ms`, `1.24 s`, `2 min 5 s`, `3 h 12 min`.
pub fn duration_us(us: u64) -> String {
    match us {
        0 => "0 ms".to_owned(),
        1..100_000 => format!("{:.1} ms", us as f64 / 1e3),
        100_000..1_000_000 => format!("{} ms", us / 1_000),
        1_000_000..10_000_000 => format!("{:.2} s", us as f64 / 1e6),
        10_000_000..60_000_000 => format!("{:.1} s", us as f64 / 1e6),
        60_000_000..3_600_000_000 => format!("{} min {} s", us / 60_000_000, us / 1_000_000 % 60),
        _ => format!("{} h {} min", us / 3_600_000_000, us / 60_000_000 % 60),
    }
}

/// Milliseconds without the unit, one decimal: for sums such as `0.2 + 15.9 + 1.2`.
pub fn ms(us: u64) -> String {
    format!("{:.1}", us as f64 / 1e3)
}

/// Tokens per second: `4.2`, `61`, `1,204`.
pub fn rate(tokens_per_s: f64) -> String {
    if !tokens_per_s.is_finite() || tokens_per_s < 0.05 {
        "0".to_owned()
    } else if tokens_per_s < 9.95 {
        format!("{tokens_per_s:.1}")
    } else {
        count(tokens_per_s.round() as u64)
    }
}

fn three_digits(value: f64) -> String {
    if value < 9.995 {
        trim(format!("{value:.2}"))
    } else if value < 99.95 {
        trim(format!("{value:.1}"))
    } else {
        format!("{value:.0}")
    }
}

/// `1.50` to `1.5`, `24.0` to `24`.
fn trim(text: String) -> String {
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_thousands_separators() {
        for (n, text) in [(0, "0"), (999, "999"), (1_000, "1,000"), (131_072, "131,072"), (1_234_567, "1,234,567")] {
            assert_eq!(count(n), text);
        }
        assert_eq!(counted(1, "block"), "1 block");
        assert_eq!(counted(0, "block"), "0 blocks");
    }

    #[test]
    fn bytes_use_binary_units_with_three_digits() {
        for (n, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (512 << 10, "512 KiB"),
            ((1 << 20) - 1, "1 MiB"),
            (24 << 20, "24 MiB"),
            (3 << 29, "1.5 GiB"),
        ] {
            assert_eq!(bytes(n), text);
        }
        assert_eq!(bytes(u64::MAX), "16384 PiB");
    }

    #[test]
    fn files_have_decimal_sizes() {
        for (n, text) in [(0, "0 B"), (999, "999 B"), (1_400_000_000, "1.4 GB"), (88_300_000, "88.3 MB")] {
            assert_eq!(decimal_bytes(n), text);
        }
    }

    #[test]
    fn percent_does_not_round_to_all_or_nothing() {
        for (part, whole, text) in [
            (0, 0, "0 %"),
            (5, 0, "0 %"),
            (1, 10_000, "1 %"),
            (9_999, 10_000, "99 %"),
            (62, 100, "62 %"),
            (4, 4, "100 %"),
        ] {
            assert_eq!(percent(part, whole), text);
        }
    }

    #[test]
    fn durations_choose_their_unit() {
        for (us, text) in [
            (0, "0 ms"),
            (200, "0.2 ms"),
            (17_300, "17.3 ms"),
            (420_000, "420 ms"),
            (1_240_000, "1.24 s"),
            (12_400_000, "12.4 s"),
            (125_000_000, "2 min 5 s"),
            (11_520_000_000, "3 h 12 min"),
        ] {
            assert_eq!(duration_us(us), text);
        }
    }

    #[test]
    fn rates_keep_two_digits() {
        for (r, text) in [(0.0, "0"), (f64::NAN, "0"), (4.24, "4.2"), (9.97, "10"), (61.4, "61"), (1204.0, "1,204")] {
            assert_eq!(rate(r), text);
        }
    }
}
