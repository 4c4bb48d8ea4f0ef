//! What can be proved about colours: contrast, distance under colour blindness, recycling of hues.

use super::*;

const BOTH: [Theme; 2] = [Theme::DARK, Theme::LIGHT];

#[test]
fn owner_marks_stand_out_from_panel_and_well_at_every_age() {
    for theme in BOTH {
        for color in theme.hues.iter().chain(&theme.neutrals) {
            for age in [0, 1, 10, RECENT_STEPS / 2, RECENT_STEPS, 10_000] {
                let mark = theme.with_recency(*color, age);
                for bg in [theme.bg_panel, theme.bg_sunken] {
                    let c = contrast(mark, bg);
                    assert!(c >= 3.0, "{color:?} aged {age} on {bg:?}: {c:.2}");
                }
            }
        }
    }
}

#[test]
fn text_is_readable_on_every_level_it_stands_on() {
    for theme in BOTH {
        let levels = [theme.bg_app, theme.bg_panel, theme.bg_sunken, theme.bg_raised];
        for bg in levels {
            for text in [theme.text_strong, theme.text, theme.text_weak, theme.accent] {
                let c = contrast(text, bg);
                assert!(c >= 4.5, "{text:?} on {bg:?}: {c:.2}");
            }
            for text in [theme.success, theme.warn, theme.error] {
                let c = contrast(text, bg);
                assert!(c >= 4.5, "{text:?} on {bg:?}: {c:.2}");
            }
            let c = contrast(theme.text_faint, bg);
            assert!(c >= 2.9, "faint on {bg:?}: {c:.2}");
        }
        assert!(contrast(theme.on_accent, theme.accent) >= 4.5);
        assert!(contrast(theme.text_strong, theme.accent_bg) >= 4.5);
    }
}

#[test]
fn newer_marks_stand_out_more() {
    for theme in BOTH {
        let distance = |age| contrast(theme.with_recency(theme.hues[0], age), theme.bg_panel);
        let ages = [0, 4, 12, 24, RECENT_STEPS];
        for pair in ages.windows(2) {
            assert!(distance(pair[0]) > distance(pair[1]), "{pair:?}");
        }
        assert_eq!(theme.with_recency(theme.hues[0], RECENT_STEPS), theme.hues[0]);
    }
}

/// Machado, Oliveira, Fernandes 2009, severity 1: rows act on linear RGB.
const PROTAN: [[f32; 3]; 3] =
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]];
const DEUTAN: [[f32; 3]; 3] =
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]];
const NORMAL: [[f32; 3]; 3] = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]];

/// OKLab of a colour as seen through `eye`.
fn seen(color: Color32, eye: &[[f32; 3]; 3]) -> [f32; 3] {
    let rgb = [color.r(), color.g(), color.b()].map(linear);
    let [r, g, b] = eye.map(|row| row.iter().zip(rgb).map(|(m, c)| m * c).sum::<f32>().clamp(0.0, 1.0));
    let l = (0.412_221_46 * r + 0.536_332_55 * g + 0.051_445_995 * b).cbrt();
    let m = (0.211_903_5 * r + 0.680_699_5 * g + 0.107_396_96 * b).cbrt();
    let s = (0.088_302_46 * r + 0.281_718_85 * g + 0.629_978_7 * b).cbrt();
    [
        0.210_454_26 * l + 0.793_617_8 * m - 0.004_072_047 * s,
        1.977_998_5 * l - 2.428_592_2 * m + 0.450_593_7 * s,
        0.025_904_037 * l + 0.782_771_77 * m - 0.808_675_77 * s,
    ]
}

#[test]
fn hues_are_told_apart_with_red_green_colour_blindness() {
    for theme in BOTH {
        for eye in [NORMAL, PROTAN, DEUTAN] {
            for (i, a) in theme.hues.iter().enumerate() {
                for b in &theme.hues[..i] {
                    let (p, q) = (seen(*a, &eye), seen(*b, &eye));
                    let distance = p.iter().zip(q).map(|(x, y)| (x - y).powi(2)).sum::<f32>().sqrt();
                    assert!(distance >= 0.07, "{a:?} and {b:?}: {distance:.3}");
                }
            }
        }
    }
}

#[test]
fn an_owner_keeps_its_hue_and_a_closed_owner_gives_it_back() {
    let mut palette = OwnerPalette::default();
    let first: Vec<OwnerHue> = (0..NUM_HUES as u64).map(|id| palette.open(100 + id)).collect();
    for (i, hue) in first.iter().enumerate() {
        assert_eq!(*hue, OwnerHue::Chat(i as u8));
        assert_eq!(palette.open(100 + i as u64), *hue, "same hue at every call");
    }
    palette.close(103);
    assert_eq!(palette.open(999), OwnerHue::Chat(3));
    assert_eq!(palette.hue(104), OwnerHue::Chat(4), "others are not recoloured");
}

#[test]
fn more_owners_than_hues_share_evenly() {
    let mut palette = OwnerPalette::default();
    let mut uses = [0; NUM_HUES];
    for id in 0..NUM_HUES as u64 * 3 {
        let OwnerHue::Chat(hue) = palette.open(id) else { panic!("chats have hues") };
        uses[hue as usize] += 1;
    }
    assert_eq!(uses, [3; NUM_HUES]);
}

#[test]
fn unknown_owners_are_neutral() {
    let palette = OwnerPalette::default();
    assert!(matches!(palette.hue(7), OwnerHue::Neutral(_)));
    for theme in BOTH {
        let c = palette.owner_color(&theme, 7);
        let spread = c.r().max(c.g()).max(c.b()) - c.r().min(c.g()).min(c.b());
        assert!(spread < 40, "{c:?} is nearly grey");
    }
}

#[test]
fn text_on_owner_fills_is_readable() {
    for theme in BOTH {
        for fill in theme.hues {
            let c = contrast(theme.text_on(fill), fill);
            assert!(c >= 4.0, "{fill:?}: {c:.2}");
        }
    }
}
