//! The power supply on Windows.
#![allow(unsafe_code)]

use windows_sys::Win32::System::Power::{GetSystemPowerStatus, SYSTEM_POWER_STATUS};

use super::PowerSupplies;

/// In the flags of a battery: it is charging.
const CHARGING: u8 = 8;
/// In the flags of a battery: there is none, or nothing is known.
const NO_BATTERY: u8 = 128;
const UNKNOWN: u8 = 255;

/// What the system reports.
pub fn supplies() -> PowerSupplies {
    let mut found = SYSTEM_POWER_STATUS::default();
    // SAFETY: the place for the result is valid.
    match unsafe { GetSystemPowerStatus(&mut found) } {
        0 => PowerSupplies::default(),
        _ => of(&found),
    }
}

fn of(found: &SYSTEM_POWER_STATUS) -> PowerSupplies {
    let mains = match found.ACLineStatus {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    };
    let battery = match found.BatteryFlag {
        UNKNOWN => None,
        flags if flags & NO_BATTERY != 0 => None,
        flags if flags & CHARGING != 0 => Some("Charging"),
        _ if mains == Some(false) => Some("Discharging"),
        _ => Some("Unknown"),
    };
    PowerSupplies { battery: battery.map(str::to_owned), mains }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_desktop_has_no_battery_and_a_laptop_runs_on_it_when_unplugged() {
        let status =
            |line, flags| of(&SYSTEM_POWER_STATUS { ACLineStatus: line, BatteryFlag: flags, ..Default::default() });
        assert_eq!(status(1, NO_BATTERY), PowerSupplies { battery: None, mains: Some(true) });
        assert!(status(0, 0).is_on_battery() && !status(1, CHARGING).is_on_battery());
        assert!(!status(255, UNKNOWN).is_on_battery());
    }
}
