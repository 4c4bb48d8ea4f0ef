//! How the app looks: every colour, distance, radius and font size, for dark and light.
//!
//! Guarantees: literal colours live only here; text keeps a contrast of at least 4.5:1 (faint text 3:1) and every mark
//! of an owner at least 3:1 against the panel; one owner has one hue everywhere, told apart also with red-green colour
//! blindness. It does not attempt user-made themes.

use egui::{Color32, Context, CornerRadius, FontFamily, FontId, Margin, Stroke, Style, TextStyle, Vec2, Visuals};
use rustc_hash::FxHashMap;

/// Distances in points. Layout uses these and no other numbers.
pub mod space {
    pub const XS: f32 = 4.0;
    pub const S: f32 = 8.0;
    pub const M: f32 = 12.0;
    pub const L: f32 = 16.0;
    pub const XL: f32 = 24.0;
}

/// Corner radii in points.
pub mod radius {
    pub const SMALL: u8 = 4;
    pub const MEDIUM: u8 = 6;
    pub const LARGE: u8 = 10;
}

/// Font sizes in points.
pub mod font_size {
    pub const SMALL: f32 = 11.0;
    pub const BODY: f32 = 13.0;
    pub const MONO: f32 = 12.0;
    pub const HEADING: f32 = 17.0;
    pub const TITLE: f32 = 22.0;
}

/// Heights and widths shared by all workspaces, in points.
pub mod size {
    pub const RAIL: f32 = 44.0;
    pub const TOP_BAR: f32 = 36.0;
    pub const STATUS_BAR: f32 = 24.0;
    pub const SESSION_LIST: f32 = 240.0;
    pub const DOCK: f32 = 360.0;
    /// The smallest side of something to click.
    pub const CLICK: f32 = 24.0;
}

/// How many owners can be told apart by hue.
pub const NUM_HUES: usize = 10;
const NUM_NEUTRALS: usize = 3;
/// Marks older than this many steps show their owner's plain colour.
pub const RECENT_STEPS: u64 = 48;

/// The design tokens of one appearance. Copy it freely.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Theme {
    pub is_dark: bool,
    /// Behind everything: rail, bars, gaps between panels.
    pub bg_app: Color32,
    /// Panels: where text and marks stand.
    pub bg_panel: Color32,
    /// Wells inside panels: text fields, code, the block map.
    pub bg_sunken: Color32,
    /// Cards, menus, buttons.
    pub bg_raised: Color32,
    pub bg_hover: Color32,
    pub bg_active: Color32,
    pub border: Color32,
    pub border_strong: Color32,
    pub text_strong: Color32,
    pub text: Color32,
    pub text_weak: Color32,
    /// Hints and marks of nothing (a free block); never for text that must be read.
    pub text_faint: Color32,
    pub accent: Color32,
    /// Text on a fill of `accent`.
    pub on_accent: Color32,
    /// A quiet fill that says "selected".
    pub accent_bg: Color32,
    pub success: Color32,
    pub warn: Color32,
    pub error: Color32,
    hues: [Color32; NUM_HUES],
    neutrals: [Color32; NUM_NEUTRALS],
}

const fn rgb(hex: u32) -> Color32 {
    Color32::from_rgb((hex >> 16) as u8, (hex >> 8) as u8, hex as u8)
}

impl Theme {
    pub const DARK: Theme = Theme {
        is_dark: true,
        bg_app: rgb(0x0f1115),
        bg_panel: rgb(0x16181d),
        bg_sunken: rgb(0x111317),
        bg_raised: rgb(0x20232a),
        bg_hover: rgb(0x292d36),
        bg_active: rgb(0x323742),
        border: rgb(0x272b33),
        border_strong: rgb(0x3b414d),
        text_strong: rgb(0xf2f4f8),
        text: rgb(0xcdd2dc),
        text_weak: rgb(0x929aaa),
        text_faint: rgb(0x69717f),
        accent: rgb(0x8b97ff),
        on_accent: rgb(0x10121a),
        accent_bg: rgb(0x272c4d),
        success: rgb(0x4cc38a),
        warn: rgb(0xf0b64a),
        error: rgb(0xff7a73),
        hues: [
            rgb(0x4daede), // sky
            rgb(0xd9631c), // orange
            rgb(0x02bd9a), // teal
            rgb(0xb060be), // purple
            rgb(0xd9d534), // yellow
            rgb(0x9fd4ff), // pale blue
            rgb(0xb86a76), // rose
            rgb(0x7f7aff), // indigo
            rgb(0x2ee8b4), // mint
            rgb(0xa4ae13), // olive
        ],
        neutrals: [rgb(0xa3abba), rgb(0x858d9c), rgb(0xc9ced8)],
    };

    pub const LIGHT: Theme = Theme {
        is_dark: false,
        bg_app: rgb(0xedeff3),
        bg_panel: rgb(0xfbfcfd),
        bg_sunken: rgb(0xf4f5f8),
        bg_raised: rgb(0xffffff),
        bg_hover: rgb(0xe9ecf1),
        bg_active: rgb(0xdce0e8),
        border: rgb(0xdfe3e9),
        border_strong: rgb(0xbcc3cf),
        text_strong: rgb(0x11141a),
        text: rgb(0x2b313c),
        text_weak: rgb(0x5a6373),
        text_faint: rgb(0x838c9b),
        accent: rgb(0x4a55d1),
        on_accent: rgb(0xffffff),
        accent_bg: rgb(0xe3e6ff),
        success: rgb(0x13794a),
        warn: rgb(0x8f5a00),
        error: rgb(0xc4302b),
        hues: [
            rgb(0x0a7fe0),
            rgb(0xcf6a08),
            rgb(0x14776c),
            rgb(0xa35fb5),
            rgb(0x564d03),
            rgb(0x075583),
            rgb(0x672b40),
            rgb(0x4543c8),
            rgb(0x089a70),
            rgb(0x6d6504),
        ],
        neutrals: [rgb(0x5f6878), rgb(0x7d8695), rgb(0x3f4652)],
    };

    pub fn new(is_dark: bool) -> Theme {
        if is_dark { Theme::DARK } else { Theme::LIGHT }
    }

    /// Makes every stock widget of `ctx` follow these tokens. Call it at start and when the appearance changes.
    pub fn apply(&self, ctx: &Context) {
        let of = if self.is_dark { egui::Theme::Dark } else { egui::Theme::Light };
        ctx.set_style_of(of, self.style());
        ctx.set_theme(of);
    }

    /// The colour that stands for an owner.
    pub fn owner_color(&self, hue: OwnerHue) -> Color32 {
        match hue {
            OwnerHue::Chat(i) => self.hues[i as usize % NUM_HUES],
            OwnerHue::Neutral(i) => self.neutrals[i as usize % NUM_NEUTRALS],
        }
    }

    /// `color`, brighter (dark theme) or deeper (light theme) the younger the event: `age` in steps. Old marks show
    /// `color` itself, so that contrast never falls below the owner's own.
    pub fn with_recency(&self, color: Color32, age: u64) -> Color32 {
        let fresh = 1.0 - age.min(RECENT_STEPS) as f32 / RECENT_STEPS as f32;
        let most = if self.is_dark { 0.42 } else { 0.32 };
        mix(color, self.text_strong, most * fresh * fresh)
    }

    /// A quiet fill of `color` for chips and rows, on the panel.
    pub fn tint(&self, color: Color32) -> Color32 {
        mix(self.bg_panel, color, if self.is_dark { 0.22 } else { 0.14 })
    }

    /// Black or white text, whichever is read better on `fill`.
    pub fn text_on(&self, fill: Color32) -> Color32 {
        let (dark, light) = (Theme::DARK.bg_app, Theme::LIGHT.bg_raised);
        if contrast(dark, fill) >= contrast(light, fill) { dark } else { light }
    }

    /// The frame of a panel: its fill and inner margin, no line.
    pub fn panel_frame(&self) -> egui::Frame {
        egui::Frame::new().fill(self.bg_panel).inner_margin(Margin::same(space::M as i8))
    }

    /// The frame of a card inside a panel.
    pub fn card_frame(&self) -> egui::Frame {
        egui::Frame::new()
            .fill(self.bg_raised)
            .stroke(Stroke::new(1.0, self.border))
            .corner_radius(CornerRadius::same(radius::MEDIUM))
            .inner_margin(Margin::same(space::S as i8))
    }

    fn style(&self) -> Style {
        let mut style = Style { visuals: self.visuals(), ..Style::default() };
        style.text_styles = [
            (TextStyle::Small, FontId::new(font_size::SMALL, FontFamily::Proportional)),
            (TextStyle::Body, FontId::new(font_size::BODY, FontFamily::Proportional)),
            (TextStyle::Button, FontId::new(font_size::BODY, FontFamily::Proportional)),
            (TextStyle::Heading, FontId::new(font_size::HEADING, FontFamily::Proportional)),
            (TextStyle::Monospace, FontId::new(font_size::MONO, FontFamily::Monospace)),
        ]
        .into();
        let spacing = &mut style.spacing;
        spacing.item_spacing = Vec2::new(space::S, space::XS + 2.0);
        spacing.button_padding = Vec2::new(10.0, space::XS);
        spacing.menu_margin = Margin::same(6);
        spacing.window_margin = Margin::same(space::M as i8);
        spacing.interact_size.y = size::CLICK;
        spacing.scroll.bar_width = 8.0;
        spacing.scroll.floating_width = 4.0;
        style.interaction.tooltip_delay = 0.25;
        style.animation_time = 0.12;
        style
    }

    fn visuals(&self) -> Visuals {
        let mut v = if self.is_dark { Visuals::dark() } else { Visuals::light() };
        v.override_text_color = None;
        v.weak_text_color = Some(self.text_weak);
        v.panel_fill = self.bg_panel;
        v.window_fill = self.bg_raised;
        v.window_stroke = Stroke::new(1.0, self.border_strong);
        v.window_corner_radius = CornerRadius::same(radius::LARGE);
        v.menu_corner_radius = CornerRadius::same(radius::MEDIUM);
        v.faint_bg_color = mix(self.bg_panel, self.bg_hover, 0.45);
        v.extreme_bg_color = self.bg_sunken;
        v.text_edit_bg_color = Some(self.bg_sunken);
        v.code_bg_color = self.bg_sunken;
        v.hyperlink_color = self.accent;
        v.warn_fg_color = self.warn;
        v.error_fg_color = self.error;
        v.selection.bg_fill = self.accent_bg;
        v.selection.stroke = Stroke::new(1.0, self.text_strong);
        v.text_cursor.stroke = Stroke::new(1.5, self.accent);
        let shadow = egui::Shadow {
            offset: [0, 6],
            blur: 20,
            spread: 0,
            color: Color32::from_black_alpha(if self.is_dark { 110 } else { 38 }),
        };
        v.window_shadow = shadow;
        v.popup_shadow = shadow;
        v.interact_cursor = Some(egui::CursorIcon::PointingHand);
        v.striped = false;
        self.widget_visuals(&mut v);
        v
    }

    fn widget_visuals(&self, v: &mut Visuals) {
        let states = [
            (&mut v.widgets.noninteractive, self.bg_panel, self.border, self.text),
            (&mut v.widgets.inactive, self.bg_raised, self.border, self.text),
            (&mut v.widgets.hovered, self.bg_hover, self.border_strong, self.text_strong),
            (&mut v.widgets.active, self.bg_active, self.border_strong, self.text_strong),
            (&mut v.widgets.open, self.bg_hover, self.border_strong, self.text_strong),
        ];
        for (w, fill, line, text) in states {
            w.bg_fill = fill;
            w.weak_bg_fill = fill;
            w.bg_stroke = Stroke::new(1.0, line);
            w.fg_stroke = Stroke::new(1.0, text);
            w.corner_radius = CornerRadius::same(radius::MEDIUM);
            w.expansion = 0.0;
        }
        // Rails of sliders, boxes of check boxes: they need a fill that shows on the panel.
        v.widgets.inactive.bg_fill = self.bg_active;
    }
}

/// Blends two opaque colours in gamma space: `t` = 0 gives `a`, 1 gives `b`.
pub fn mix(a: Color32, b: Color32, t: f32) -> Color32 {
    a.lerp_to_gamma(b, t.clamp(0.0, 1.0))
}

/// Contrast ratio of two opaque colours, 1 to 21 (WCAG 2.2, relative luminance).
pub fn contrast(a: Color32, b: Color32) -> f32 {
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

fn luminance(c: Color32) -> f32 {
    let [r, g, b] = [c.r(), c.g(), c.b()].map(linear);
    0.2126 * r + 0.7152 * g + 0.0722 * b
}

fn linear(byte: u8) -> f32 {
    let v = f32::from(byte) / 255.0;
    if v <= 0.04045 { v / 12.92 } else { ((v + 0.055) / 1.055).powf(2.4) }
}

/// Which hue an owner has. Colours come from [`Theme::owner_color`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OwnerHue {
    /// One of [`NUM_HUES`] hues, handed out per chat.
    Chat(u8),
    /// Greys, for requests that belong to no chat of this window.
    Neutral(u8),
}

/// Hands out hues to owners and takes them back.
///
/// Guarantees: an owner keeps its hue while open; no two open owners share one while fewer than [`NUM_HUES`] are open;
/// the lowest hue that is least used is handed out next. Owners that were never opened (API clients) are neutral.
#[derive(Clone, Debug, Default)]
pub struct OwnerPalette {
    hues: FxHashMap<u64, u8>,
}

impl OwnerPalette {
    /// Gives `owner_id` the hue that it had before, if nobody has it now; else one as [`OwnerPalette::open`] does.
    pub fn reopen(&mut self, owner_id: u64, hue: u8) -> OwnerHue {
        let is_taken = self.hues.values().any(|h| *h == hue);
        if is_taken || usize::from(hue) >= NUM_HUES {
            return self.open(owner_id);
        }
        OwnerHue::Chat(*self.hues.entry(owner_id).or_insert(hue))
    }

    /// Gives `owner_id` a hue, the same at every call until [`OwnerPalette::close`].
    pub fn open(&mut self, owner_id: u64) -> OwnerHue {
        if let Some(&hue) = self.hues.get(&owner_id) {
            return OwnerHue::Chat(hue);
        }
        let mut uses = [0u32; NUM_HUES];
        for &hue in self.hues.values() {
            uses[hue as usize] += 1;
        }
        let hue = (0..NUM_HUES).min_by_key(|&i| uses[i]).unwrap_or(0) as u8;
        self.hues.insert(owner_id, hue);
        OwnerHue::Chat(hue)
    }

    /// Takes the hue back, so that another owner can have it.
    pub fn close(&mut self, owner_id: u64) {
        self.hues.remove(&owner_id);
    }

    pub fn hue(&self, owner_id: u64) -> OwnerHue {
        match self.hues.get(&owner_id) {
            Some(&hue) => OwnerHue::Chat(hue),
            None => OwnerHue::Neutral((owner_id % NUM_NEUTRALS as u64) as u8),
        }
    }

    /// The colour of an owner in `theme`.
    pub fn owner_color(&self, theme: &Theme, owner_id: u64) -> Color32 {
        theme.owner_color(self.hue(owner_id))
    }
}

#[cfg(test)]
#[path = "theme_tests.rs"]
mod tests;
