//! Parsing of quantities with units: rates, compute speed and times.

/// Parses a number above 0 with one of `units`, and multiplies it by the unit's factor.
fn quantity(text: &str, units: &[(&str, f64)], example: &str) -> Result<f64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim();
    let Ok(number) = number.parse::<f64>() else {
        return Err(format!("'{text}' is not a number with a unit, like '{example}'"));
    };
    match units.iter().find(|(name, _)| *name == unit) {
        Some((_, factor)) if number > 0.0 && number.is_finite() => Ok(number * factor),
        Some(_) => Err(format!("'{text}' is not a number above 0")),
        None => {
            let known: Vec<&str> = units.iter().map(|(name, _)| *name).collect();
            Err(format!("'{text}' has the unknown unit '{unit}'; use one of {}", known.join(", ")))
        }
    }
}

/// Parses a data rate into bits per second.
pub(crate) fn rate(text: &str) -> Result<f64, String> {
    let units = [
        ("bit/s", 1.0),
        ("kbit/s", 1e3),
        ("Mbit/s", 1e6),
        ("Gbit/s", 1e9),
        ("B/s", 8.0),
        ("kB/s", 8e3),
        ("MB/s", 8e6),
        ("GB/s", 8e9),
    ];
    quantity(text, &units, "100 Mbit/s")
}

/// Parses a compute speed into FLOP/s.
pub(crate) fn compute(text: &str) -> Result<f64, String> {
    quantity(text, &[("MFLOP/s", 1e6), ("GFLOP/s", 1e9), ("TFLOP/s", 1e12)], "50 GFLOP/s")
}

/// Parses a time into seconds; `0` needs no unit.
pub(crate) fn time(text: &str) -> Result<f64, String> {
    match text.trim() {
        "0" => Ok(0.0),
        other => quantity(other, &[("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)], "2 ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_units_are_parsed_and_others_refused() {
        assert_eq!((rate("100 Mbit/s"), rate("2MB/s")), (Ok(1e8), Ok(1.6e7)));
        assert_eq!((compute("50 GFLOP/s"), time("2 ms"), time("0")), (Ok(5e10), Ok(0.002), Ok(0.0)));
        assert!(rate("100 Mbps").unwrap_err().contains("unit 'Mbps'; use one of bit/s"));
        assert!(rate("-1 Mbit/s").unwrap_err().contains("like '100 Mbit/s'"));
        assert!(compute("0 GFLOP/s").unwrap_err().contains("not a number above 0"));
        assert!(time("fast").is_err() && time("").is_err());
    }
}
