//! Names that settings had before, so that what was written for them ends in a sentence with the new spelling.

use super::SettingRow;

/// A setting or a flag of an earlier version.
pub struct RenamedSetting {
    /// The earlier name.
    pub old: &'static str,
    /// The name now.
    pub new: &'static str,
    /// The value now: `{}` is the earlier one.
    pub value: &'static str,
}

/// All earlier names.
pub const RENAMED: &[RenamedSetting] = &[
    RenamedSetting { old: "cache-mem", new: "cache", value: "{}" },
    RenamedSetting { old: "cache-experts", new: "cache", value: "{}x" },
    RenamedSetting { old: "preload", new: "cache", value: "all" },
    RenamedSetting { old: "cache-scope", new: "scope", value: "{}" },
    RenamedSetting { old: "cache-scratch", new: "scratch", value: "{}" },
    RenamedSetting { old: "vram-mem", new: "vram", value: "{}" },
    RenamedSetting { old: "vram-experts", new: "vram", value: "{}x" },
    RenamedSetting { old: "draft", new: "speculate", value: "auto+draft={}" },
    RenamedSetting { old: "placement", new: "edge-placement", value: "{}" },
    RenamedSetting { old: "json-schema", new: "format", value: "json:{}" },
    RenamedSetting { old: "regex", new: "format", value: "regex:{}" },
    RenamedSetting { old: "grammar", new: "format", value: "grammar:{}" },
    RenamedSetting { old: "chunk", new: "prefill-tokens", value: "{}" },
];

/// The row of an earlier name.
pub fn renamed(old: &str) -> Option<&'static RenamedSetting> {
    RENAMED.iter().find(|row| row.old == old)
}

impl RenamedSetting {
    /// The value that says the same as an earlier one; of a list, each.
    pub fn value_of(&self, old: &str) -> String {
        let one = |old: &str| self.value.replace("{}", old);
        if self.value == "{}x" { old.split(',').map(one).collect::<Vec<_>>().join(",") } else { one(old) }
    }

    /// Whether the earlier name took no value.
    pub fn was_switch(&self) -> bool {
        !self.value.contains("{}")
    }

    /// The new spelling; `is_flag` says whether the command has a flag of the new name.
    pub fn typed_with(&self, old: &str, is_flag: bool) -> String {
        let value = self.value_of(old);
        match SettingRow::named(self.new) {
            Some(row) if !is_flag => row.typed_with(&value),
            _ => format!("--{} {value}", self.new),
        }
    }
}
